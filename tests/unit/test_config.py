"""Settings: the three sources and their order, and that every mistake becomes one readable line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ConfigError
from pipeline.config import JobConfig, StorageConfig, load_config

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = "manifest: m.jsonl\noutput: out\n"


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("REELKEEP_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return str(path)

    return write


def problem(path: str | None, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, argv)
    return str(caught.value)


@pytest.mark.parametrize("name", ["demo", "nightly", "annotate"])
def test_shipped_configs_load_and_are_not_all_defaults(name: str) -> None:
    config = load_config(str(CONFIGS / f"{name}.yaml"), ["--manifest", "m.jsonl", "--output", "out"])
    assert config.engine != JobConfig(manifest="m", output="o").engine
    assert config.manifest == "m.jsonl"


def test_every_shipped_config_is_tested_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {"demo", "nightly", "annotate"}
    for path in CONFIGS.glob("*.yaml"):
        load_config(str(path), ["--manifest", "m.jsonl", "--output", "out"])


def test_later_sources_win(yaml_file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_file(BASE + "engine: {budget_tokens: 1, block_tokens: 2, policy: random}\nlimit: 1\n")
    monkeypatch.setenv("REELKEEP_ENGINE__BUDGET_TOKENS", "10")
    monkeypatch.setenv("REELKEEP_ENGINE__BLOCK_TOKENS", "20")
    config = load_config(path, ["--engine.block-tokens", "200"])
    assert (config.engine.policy, config.engine.budget_tokens, config.engine.block_tokens, config.limit) == ("random", 10, 200, 1)


def test_the_config_option_names_the_file(yaml_file) -> None:
    assert load_config(None, ["--config", yaml_file(BASE + "limit: 7\n")]).limit == 7


def test_lists_flags_and_null_on_the_command_line(yaml_file) -> None:
    path = yaml_file(BASE + "limit: 7\ntrace: true\n")
    config = load_config(path, ["--only", "a", "--only", "b,c", "--dry-run", "--no-trace", "--limit", "null"])
    assert (config.only, config.dry_run, config.trace, config.limit) == (["a", "b", "c"], True, False, None)


@pytest.mark.parametrize("given", [["seed=3", "mode=fast"], ['{"seed": 3, "mode": "fast"}']])
def test_mappings_keep_the_types_of_their_values(yaml_file, given: list[str]) -> None:
    options = [token for value in given for token in ("--engine.policy-options", value)]
    assert load_config(yaml_file(BASE), options).engine.policy_options == {"seed": 3, "mode": "fast"}


def test_a_mapping_is_replaced_not_mixed(yaml_file) -> None:
    path = yaml_file(BASE + "engine: {policy: a, policy_options: {of_a: 1}}\n")
    assert load_config(path, ["--engine.policy-options", "of_b=2"]).engine.policy_options == {"of_b": 2}


def test_environment_reaches_into_mappings_and_lists(yaml_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELKEEP_ENGINE__POLICY_OPTIONS__SEED", "9")
    monkeypatch.setenv("REELKEEP_ONLY", '["a", "b"]')
    config = load_config(yaml_file(BASE), [])
    assert (config.engine.policy_options, config.only) == ({"seed": 9}, ["a", "b"])


def test_a_section_heading_alone_means_its_defaults(yaml_file) -> None:
    assert load_config(yaml_file(BASE + "engine:\n  # budget_tokens: 4\n"), []) == load_config(yaml_file(BASE), [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {budgt_tokens: 4}", ["job.yaml: engine.budgt_tokens is not a setting", "did you mean engine.budget_tokens?"]),
        ("budget_tokens: 4", ["budget_tokens is not a setting", "did you mean engine.budget_tokens?"]),
        ("outptu: x", ["outptu is not a setting", "did you mean output?"]),
        ("engine: {budget_tokens: 0}", ["engine.budget_tokens=0", "greater than or equal to 1", "default 1024"]),
        ("engine: {answer: {top_p: many}}", ["engine.answer.top_p='many'", "number"]),
        ("engine: 5", ["engine=5 must be a section"]),
        ("engine: {policy_options: {a: [1]}}", ["engine.policy_options.a=[1] must be a number, a text, or true or false"]),
        ("pool: {min_actors: 3, max_actors: 2}", ["pool: max_actors=2 must be at least min_actors=3"]),
        ("pool: {num_gpus: 1.5}", ["num_gpus=1.5 must be a fraction up to 1 or a whole number"]),
        ("storage: {endpoint_url: minio.local}", ["storage.endpoint_url='minio.local'", "http"]),
        ("videos: v", ["manifest can't be combined with videos"]),
    ],
)
def test_mistakes_in_a_file_are_one_line_with_the_remedy(yaml_file, text: str, words: list[str]) -> None:
    message = problem(yaml_file(BASE + text + "\n"))
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: b: c", "not valid YAML"),
        ("- 1", "must hold `key: value` lines"),
        ("limit: 1\nlimit: 2", "given twice"),
        ("limit: 1\nlimit: 2", "line 2"),
    ],
)
def test_files_that_are_not_settings(yaml_file, text: str, word: str) -> None:
    assert word in problem(yaml_file(text))


def test_a_missing_file_is_named() -> None:
    assert problem("/nowhere/job.yaml").startswith("config=/nowhere/job.yaml: no such file")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--engine.budgt-tokens", "1"], ["--engine.budgt-tokens", "did you mean --engine.budget-tokens?"]),
        (["--engine.budget_tokens=1"], ["did you mean --engine.budget-tokens?"]),
        (["--budget-tokens", "1"], ["did you mean --engine.budget-tokens?"]),
        (["--engine.budget", "1"], ["--engine.budget is not a setting"]),
        (["stray"], ["stray"]),
        (["--limit"], ["--limit"]),
        (["--limit", "0"], ["command line: limit='0'", "greater than or equal to 1"]),
    ],
)
def test_mistakes_on_the_command_line(yaml_file, argv: list[str], words: list[str]) -> None:
    message = problem(yaml_file(BASE), *argv)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


def test_mistakes_in_the_environment_name_the_variable(yaml_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELKEEP_ENGINE__BUDGET_TOKENS", "-7")
    assert problem(yaml_file(BASE)).startswith("REELKEEP_ENGINE__BUDGET_TOKENS: engine.budget_tokens='-7'")
    monkeypatch.setenv("REELKEEP_ENGINE__BUDGT_TOKENS", "7")
    assert "did you mean REELKEEP_ENGINE__BUDGET_TOKENS?" in problem(yaml_file(BASE))


def test_a_list_in_the_environment_must_be_json(yaml_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELKEEP_ONLY", "a,b")
    assert problem(yaml_file(BASE)).startswith("environment: REELKEEP_ONLY must be JSON")


def test_the_build_commit_is_not_a_setting(yaml_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELKEEP_COMMIT", "abc")
    load_config(yaml_file(BASE), [])


def test_several_problems_are_several_lines(yaml_file) -> None:
    message = problem(yaml_file("limit: 0\nengine: {block_tokens: x}\nmanifest: m\n"))
    assert len(message.splitlines()) == 3
    assert "output is missing; give --output" in message


def test_nothing_to_watch_is_said() -> None:
    assert "nothing to watch" in problem(None, "--output", "o", "--videos", "v")


@pytest.mark.parametrize("key", ["access_key", "aws_secret_access_key", "session_token", "password"])
def test_secrets_are_refused_and_never_repeated(yaml_file, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    sources = [
        problem(yaml_file(BASE + f"storage: {{{key}: hush-hush}}\n")),
        problem(yaml_file(BASE), f"--storage.{key.replace('_', '-')}", "hush-hush"),
    ]
    monkeypatch.setenv(f"REELKEEP_STORAGE__{key.upper()}", "hush-hush")
    sources.append(problem(yaml_file(BASE)))
    for message in sources:
        assert "AWS_ACCESS_KEY_ID" in message
        assert "hush" not in message


def test_credentials_in_the_endpoint_are_refused_and_never_repeated(yaml_file) -> None:
    message = problem(yaml_file(BASE + "storage: {endpoint_url: 'https://user:hush@host'}\n"))
    assert "must not hold a user name" in message
    assert "hush" not in message


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_config(None, ["--help"], "python -m jobs.answer")
    shown = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    for option in ("--engine.budget-tokens", "--decode.fps", "--storage.spool-bytes", "--pool.num-gpus", "--log.level", "--config"):
        assert option in shown
    assert "Entries each layer keeps per KV head" in shown
    assert "(default: 1024)" in shown


def test_every_field_is_described() -> None:
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            if not field.description and not hasattr(field.annotation, "model_fields"):
                yield prefix + name
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")

    assert list(undescribed(JobConfig)) == []


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        StorageConfig().region = "elsewhere"  # type: ignore[misc]


def test_only_one_file_reads_yaml() -> None:
    root = CONFIGS.parent
    readers = [
        p
        for package in ("engine", "pipeline", "jobs")
        for p in (root / package).rglob("*.py")
        if "import yaml" in p.read_text(encoding="utf-8")
    ]
    assert [str(p.relative_to(root)) for p in readers] == ["pipeline/config.py"]
