"""A job's settings, and the only place that reads YAML: file, then environment, then command line, the later winning."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import reprlib
import stat
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from engine.errors import ConfigError
from pipeline.settings import SECRET_REMEDY, JobConfig, LogConfig, PoolConfig, StorageConfig

__all__ = ["COMMIT_VARIABLE", "ENV_PREFIX", "JobConfig", "LogConfig", "PoolConfig", "StorageConfig", "describe_errors", "load_config"]

ENV_PREFIX = "REELKEEP_"
COMMIT_VARIABLE = "REELKEEP_COMMIT"
"""Set by an image's build to the source commit; recorded in run.json where there is no git checkout to ask."""

MAX_YAML_BYTES = 2**20

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_SECRET = re.compile(r"access_?key|secret|password|passwd|credential|session_?token|api_?key|^token$|^aws_", re.IGNORECASE)


class _Settings(JobConfig, BaseSettings):  # type: ignore[misc]
    """Watch videos, answer questions about them, write Parquet.

    Example: --config configs/nightly.yaml --manifest tonight.jsonl --output answers/tonight. Exit codes: 0 all questions answered; 1 the job
    failed; 2 settings, manifest, model or cluster can't work; 3 finished, but some questions have no answer; 130 stopped. After 1 and 130 the
    same command goes on with what is missing. configs/README.md explains manifests and tables.
    """

    config: str | None = Field(
        None, description="YAML file of settings; the environment (REELKEEP_ENGINE__BUDGET_TOKENS=2048) and the command line win over it."
    )


def load_config(
    config_path: str | None, argv: Sequence[str], prog: str | None = None, defaults: Mapping[str, Any] | None = None
) -> JobConfig:
    """Merge the YAML file, the environment and the command line into one checked configuration.

    Args:
        config_path: YAML file; None takes the one that `--config` in `argv` names, if any.
        argv: command line without the program's name. `--help` prints every field and exits with 0.
        prog: program name that the help shows.
        defaults: settings that all three win over, with the same names.

    Raises:
        ConfigError: one line a problem, each naming the field, the value, the bound and where the value came from.
    """
    command_line = _read_command_line(argv, prog)
    named_path = command_line.pop("config", None)
    path = config_path or named_path
    environment, variables = _read_environment(os.environ)
    file = _read_yaml(path) if path else {}
    merged: dict[str, Any] = dict(defaults or {})
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
        source.root_parser.description = inspect.getdoc(_Settings)
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
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r:.80} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"config={path}: isn't a regular file; name a YAML file")
        with open(path, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise ConfigError(f"config={path}: is larger than {MAX_YAML_BYTES} bytes; name a YAML file of settings")
        content = yaml.load(data.decode("utf-8-sig"), Loader=_StrictLoader)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"config={path}: no such file; the shipped ones are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path}: can't be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"config={path}: is nested too deep; settings have two levels") from None
    except (ValueError, TypeError) as error:  # a date that isn't one, say, or a key that is a list
        raise ConfigError(f"config={path}: holds a value that can't be read: {error}") from None
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
            merged[key] = {k: plain_value(v) for k, v in value.items()}
        else:
            merged[key] = value
    return merged


def plain_value(text: Any) -> Any:
    """A text as YAML would read it, where that is a number, true or false; else as it is."""
    try:
        value = yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
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
        return f"{shown} is not a setting: {SECRET_REMEDY}"
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
    """A value in at most 80 characters, found without writing all of it out: it may be huge, or hold itself."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
