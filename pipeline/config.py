"""A job's settings, and the only place that reads YAML: file, then environment, then command line, the later winning."""

from __future__ import annotations

import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from engine.config import EngineConfig
from engine.errors import ConfigError
from pipeline.video.config import DecodeConfig

ENV_PREFIX = "REELKEEP_"
COMMIT_VARIABLE = "REELKEEP_COMMIT"
"""Set by an image's build to the source commit; recorded in run.json where there is no git checkout to ask."""

_SECRET = re.compile(r"access_?key|secret|password|passwd|credential|session_?token|api_?key|^token$|^aws_", re.IGNORECASE)
_SECRET_REMEDY = (
    "credentials aren't taken from settings; put them in the usual AWS places "
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE with ~/.aws/credentials, or the machine's role)"
)


class StorageConfig(BaseModel):
    """Where objects are, how patiently they are fetched, and how much disk may be used meanwhile."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint_url: str | None = Field(
        None, description="Address of an S3-compatible server, e.g. http://127.0.0.1:9000; default: AWS, or AWS_ENDPOINT_URL."
    )
    region: str | None = Field(None, description="Region of the buckets; default: what the AWS environment says, else us-east-1.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="How a bucket is put into the address: path (host/bucket, for most S3-compatible servers) or virtual (bucket.host).",
    )
    spool_dir: str | None = Field(
        None,
        description="Folder that videos are downloaded to while they are read; default: a private folder under the system's temporary one.",
    )
    spool_bytes: int = Field(
        64 * 2**30, ge=1, description="Most bytes all downloads on one machine may take together in spool_dir; a larger video is refused."
    )
    spool_wait_s: float = Field(600.0, ge=0.0, description="Seconds to wait for other videos to leave room in spool_dir before giving up.")
    max_attempts: int = Field(5, ge=1, le=20, description="Tries of one request, the first included, with growing pauses between them.")
    connect_timeout_s: float = Field(10.0, gt=0.0, description="Seconds to wait for a connection.")
    read_timeout_s: float = Field(60.0, gt=0.0, description="Seconds without a byte after which a request has failed.")
    download_threads: int = Field(4, ge=1, le=64, description="Parallel range requests of one download.")
    verify_etag: bool = Field(
        True, description="Compare a download with the object's ETag where that is an MD5. Switch off for servers whose ETag isn't one."
    )

    @field_validator("endpoint_url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        parts = urlsplit(value)
        if parts.username or parts.password:
            raise ValueError(f"must not hold a user name or a password: {_SECRET_REMEDY}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("must be an address such as https://s3.example.org or http://127.0.0.1:9000")
        return value.rstrip("/")


class PoolConfig(BaseModel):
    """How many engines run at once, on what, and how often a video is tried."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_actors: int = Field(1, ge=1, description="Engines that are always up.")
    max_actors: int | None = Field(None, ge=1, description="Most engines at once; default: as many as the cluster has room for.")
    initial_actors: int | None = Field(None, ge=1, description="Engines started at the beginning; default: min_actors.")
    num_gpus: float | None = Field(
        None,
        ge=0.0,
        description="GPUs of one engine; a fraction shares a GPU, 0 runs on CPU. Default: 1 where the cluster has GPUs, else 0.",
    )
    num_cpus: float = Field(1.0, ge=0.0, description="CPUs that Ray sets aside for one engine.")
    threads: int | None = Field(None, ge=1, description="Threads PyTorch may use in one engine; default: num_cpus rounded up.")
    max_attempts: int = Field(3, ge=1, description="Tries of one video, counting those that killed the process, before it is quarantined.")

    @model_validator(mode="after")
    def _ordered(self) -> PoolConfig:
        if self.max_actors is not None and self.max_actors < self.min_actors:
            raise ValueError(f"max_actors={self.max_actors} must be at least min_actors={self.min_actors}")
        if self.initial_actors is not None and not self.min_actors <= self.initial_actors <= (self.max_actors or self.initial_actors):
            raise ValueError(
                f"initial_actors={self.initial_actors} must lie between min_actors={self.min_actors} and max_actors={self.max_actors}"
            )
        if self.num_gpus is not None and self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus={self.num_gpus} must be a fraction up to 1 or a whole number")
        return self


class LogConfig(BaseModel):
    """What is told while a job runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least serious line that is written.")
    format: Literal["text", "json"] = Field("text", description="text for people, json (an object a line) for log collectors.")
    progress: Literal["auto", "live", "lines", "off"] = Field(
        "auto", description="live rewrites one line, lines writes one now and then; auto: live on a terminal, lines elsewhere."
    )
    progress_interval_s: float = Field(60.0, gt=0.0, description="Seconds between two progress lines.")


class JobConfig(BaseModel):
    """Watch videos, answer questions about them, write Parquet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    manifest: str | None = Field(None, description="What to watch and ask: a Parquet, JSON Lines or CSV file, local or s3://.")
    videos: str | None = Field(None, description="Instead of a manifest: a folder or s3:// prefix whose videos all get the same questions.")
    questions: str | None = Field(
        None, description="Questions for every file under `videos`: JSON, JSON Lines, CSV, Parquet, or text with one question a line."
    )
    output: str = Field(description="Folder or s3:// prefix for the result tables.")
    limit: int | None = Field(None, ge=1, description="Take only the first N videos.")
    only: list[str] = Field([], description="Take only these video ids; may be repeated.")
    dry_run: bool = Field(False, description="Check everything, say what would be done, and stop.")
    trace: bool = Field(False, description="Also write the trace table: a row for every block of every video.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The model and its memory.")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="Which frames are taken from a video.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Object storage and the download spool.")
    pool: PoolConfig = Field(default_factory=PoolConfig, description="The pool of engines.")
    log: LogConfig = Field(default_factory=LogConfig, description="Log lines and progress.")

    @model_validator(mode="after")
    def _one_input(self) -> JobConfig:
        if self.manifest is not None and (self.videos is not None or self.questions is not None):
            raise ValueError("manifest can't be combined with videos and questions; give one or the other")
        if self.manifest is None and (self.videos is None or self.questions is None):
            raise ValueError("nothing to watch: give manifest, or both videos and questions")
        return self


class _Settings(JobConfig, BaseSettings):  # type: ignore[misc]
    """Watch videos, answer questions about them, write Parquet."""

    config: str | None = Field(
        None, description="YAML file of settings; the environment (REELKEEP_ENGINE__BUDGET_TOKENS=2048) and the command line win over it."
    )


def load_config(config_path: str | None, argv: Sequence[str], prog: str | None = None) -> JobConfig:
    """Merge the YAML file, the environment and the command line into one checked configuration.

    Args:
        config_path: YAML file; None takes the one that `--config` in `argv` names, if any.
        argv: command line without the program's name. `--help` prints every field and exits with 0.
        prog: program name that the help shows.

    Raises:
        ConfigError: one line a problem, each naming the field, the value, the bound and where the value came from.
    """
    command_line = _read_command_line(argv, prog)
    named_path = command_line.pop("config", None)
    path = config_path or named_path
    environment, variables = _read_environment(os.environ)
    file = _read_yaml(path) if path else {}
    merged: dict[str, Any] = {}
    for source in (file, environment, command_line):
        merged = _merge(merged, source, JobConfig, texts=source is not file)
    try:
        return JobConfig.model_validate(merged)
    except ValidationError as error:

        def origin(loc: tuple[Any, ...]) -> str:
            if _holds(command_line, loc):
                return "command line"
            if _holds(environment, loc):
                return variables.get(".".join(map(str, loc)), "environment")
            return str(path) if _holds(file, loc) else ""

        raise ConfigError("\n".join(describe_errors(error, JobConfig, origin))) from None


def describe_errors(
    error: ValidationError,
    model: type[BaseModel],
    origin: typing.Callable[[tuple[Any, ...]], str] = lambda loc: "",
    noun: str = "setting",
) -> Iterator[str]:
    """Turn each of pydantic's problems into one line: field, value, bound, remedy.

    Args:
        error: what pydantic raised.
        model: the model that was validated, for the nearest key and the defaults.
        origin: says where the value at a location came from; "" when nobody gave it.
        noun: what a key of the model is called.
    """
    known = _known_keys(model)
    of_unions = set()
    for problem in error.errors(include_url=False):
        loc = problem["loc"]
        if loc and loc[-1] in ("float", "int", "str", "bool"):
            if loc[:-1] not in of_unions:
                yield f"{origin(loc)}: {'.'.join(map(str, loc[:-1]))}={_short(problem['input'])} must be a number, a text, or true or false"
            of_unions.add(loc[:-1])
            continue
        key = ".".join(map(str, loc))
        where = origin(loc)
        start = f"{where}: " if where else ""
        if problem["type"] == "extra_forbidden":
            yield start + _unknown(key, known, noun=noun)
            continue
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be").replace("valid tuple", "list")
        if problem["type"] == "missing":
            yield f"{start}{key} is missing" + (f"; give --{key.replace('_', '-')}: {known[key].description}" if noun == "setting" else "")
        elif isinstance(problem["input"], BaseModel | Mapping):
            yield f"{start}{key + ': ' if key else ''}{message}"
        elif problem["type"] == "model_type":
            yield f"{start}{key}={_short(problem['input'])} must be a section of `key: value` settings"
        elif "password" in message:
            yield f"{start}{key} {message}"
        else:
            field = known.get(key)
            default = "" if field is None or field.is_required() else f"; default {field.get_default(call_default_factory=True)!r}"
            yield f"{start}{key}={_short(problem['input'])} {message[0].lower() + message[1:]}{default}"


def _read_command_line(argv: Sequence[str], prog: str | None) -> dict[str, Any]:
    known = _known_keys(_Settings)
    options = {"--" + key.replace("_", "-"): key for key in known} | {"--help": "help"}
    options |= {"--no-" + o[2:]: k for o, k in options.items() if k in known and known[k].annotation is bool}
    for token in argv:
        option = token.split("=", 1)[0]
        if option.startswith("--") and option not in options:
            plain = option[2:].replace("-", "_")
            spelling = "--" + plain.replace("_", "-")
            hint = f"did you mean {spelling}?" if spelling in options else ""
            raise ConfigError("command line: " + _unknown(option, known, plain, hint, spell=lambda key: "--" + key.replace("_", "-")))
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            _Settings,
            cli_parse_args=False,
            cli_prog_name=prog or Path(sys.argv[0]).name,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_exit_on_error=False,
            cli_parse_none_str="null",
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_use_class_docs_for_groups=True,
        )
        source.root_parser.usage = "%(prog)s [--config FILE] [--KEY VALUE ...]"
        return source(args=list(argv))()
    except SettingsError as error:
        raise ConfigError(f"command line: {str(error).removeprefix('error parsing CLI: ')}; --help lists every option") from None


def _read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings in the environment, and which variable gave each."""
    known = _known_keys(JobConfig)
    variables = {}
    for name in environ:
        if not name.upper().startswith(ENV_PREFIX) or name == COMMIT_VARIABLE:
            continue
        key = name[len(ENV_PREFIX) :].lower().replace("__", ".")
        variables[key] = name
        inside_a_mapping = any(key.startswith(k + ".") and not _submodel(known[k].annotation) for k in known)
        if key not in known and not inside_a_mapping:
            raise ConfigError("environment: " + _unknown(name, known, key, spell=lambda k: ENV_PREFIX + k.replace(".", "__").upper()))
    try:
        source = EnvSettingsSource(
            _Settings, case_sensitive=False, env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_parse_none_str="null"
        )
        return source(), variables
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = ENV_PREFIX + field.group(1).upper() if field else str(error)
        raise ConfigError(f'environment: {name} must be JSON, as lists and mappings are, e.g. REELKEEP_ONLY=\'["a", "b"]\'') from None


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error, not a silent replacement."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, typing.Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = yaml.load(text, Loader=_StrictLoader)
    except FileNotFoundError:
        raise ConfigError(f"config={path}: no such file; the shipped ones are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path}: can't be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a {type(content).__name__}")
    return content


def _merge(base: dict[str, Any], over: Mapping[str, Any], model: type[BaseModel], *, texts: bool) -> dict[str, Any]:
    """Lay `over` on `base`, section by section; a list or a mapping that is a value is replaced whole.

    Args:
        texts: a mapping's values come as text (environment, command line) and are read as YAML would read them.
    """
    merged = dict(base)
    for key, value in over.items():
        field = model.model_fields.get(key)
        section = _submodel(field.annotation) if field else None
        if section and value is None:
            continue  # a section of which only the heading is left
        if section and isinstance(value, Mapping):
            merged[key] = _merge(merged.get(key) or {}, value, section, texts=texts)
        elif texts and field and typing.get_origin(field.annotation) is dict and isinstance(value, Mapping):
            merged[key] = {k: _plain_value(v) for k, v in value.items()}
        else:
            merged[key] = value
    return merged


def _plain_value(text: Any) -> Any:
    try:
        value = yaml.safe_load(text) if isinstance(text, str) else text
    except yaml.YAMLError:
        return text
    return value if isinstance(value, float | int | str | bool) else text


def _known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of a model and its sections, dotted, with its field."""
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        if section := _submodel(field.annotation):
            keys |= _known_keys(section, f"{prefix}{name}.")
    return keys


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((m for a in typing.get_args(annotation) if (m := _submodel(a))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _unknown(
    shown: str,
    known: Mapping[str, Any],
    key: str | None = None,
    hint: str = "",
    spell: typing.Callable[[str], str] = str,
    noun: str = "setting",
) -> str:
    key = key or shown
    if _SECRET.search(key.rsplit(".", 1)[-1]):
        return f"{shown} is not a setting: {_SECRET_REMEDY}"
    if not hint:
        leaves = {k.rsplit(".", 1)[-1]: k for k in reversed(list(known))}
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        near = near or [leaves[m] for m in difflib.get_close_matches(key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.6)]
        near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        hint = f"did you mean {spell(near[0])}?" if near else ""
    return f"{shown} is not a {noun}; {hint}"


def _holds(source: Mapping[str, Any], loc: tuple[Any, ...]) -> bool:
    node: Any = source
    for step in loc:
        if isinstance(node, Mapping) and step in node:
            node = node[step]
        else:
            return not isinstance(node, Mapping)
    return bool(loc)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
