"""Reads the keys of a stage from the source of their dataclasses, because importing trl and transformers is slow."""

import ast
import enum
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..registry import STAGES

PACKAGE = __name__.partition(".")[0]
#: Keys of a stage that the run sets. Neither a recipe nor a flag may set them.
RUN_KEYS = ("output_dir", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_always_push", "disable_tqdm")
#: Keys that only the scripts of transformers and trl read, or that this package replaces: its own loading,
#: resuming and publishing.
SCRIPT_KEYS = ("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "model_init_kwargs",
               "trust_remote_code", "hub_private_repo", "hub_revision")  # fmt: skip
#: Key -> the end of the message for a stage that refuses it, instead of "not supported".
REFUSAL_TEXTS = {
    "auto_find_batch_size": "refused, because it would train with a different batch size than the run records: set "
    "per_device_train_batch_size to one that fits, with gradient_accumulation_steps",
    "gguf_file": "not supported by recipes: name the file in model_name_or_path, as in FOLDER/FILE.gguf",
    "model_name_or_path": "not supported by the stage reward, which starts from the SFT policy: set "
    "--sft.model_name_or_path, or model_name_or_path in sft.yaml",
}
#: (stage, key) -> help text that replaces that of the library that declares the key.
HELP = {
    ("sft", "pad_token"): "PAD token, which no text may use; None keeps the tokenizer's, or picks another token if "
    "its PAD token is EOS.",
}
#: Annotation -> type. Values of these types are checked before the dataclasses are imported.
_TYPES: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "int | None": int | None, "float | None": float | None,
    "bool | None": bool | None, "str | None": str | None, "list[str] | None": list[str] | None,
    "list[float] | None": list[float] | None, "str | list[str] | None": str | list[str] | None,
    "dict[str, str]": dict[str, str],
}  # fmt: skip


@dataclass(frozen=True)
class DeclaredKey:
    """A key as its dataclass declares it.

    Attributes:
        annotation: The source text of the annotation.
        default: The value of the default if it is a literal, otherwise its source text; None without a default, or if a
            default_factory makes it.
        help: The help text.
        is_own: Whether this package declares the key, rather than trl or transformers.
    """

    annotation: str
    default: Any
    help: str
    is_own: bool = False

    @property
    def type_hint(self) -> Any:
        """The type, if the annotation is in `_TYPES` or names an enumeration of transformers; None otherwise."""
        return _TYPES.get(self.annotation) or _enum_type(self.annotation)


@functools.cache
def declared_keys(stage: str) -> Mapping[str, DeclaredKey]:
    """Returns every key that a stage accepts: as `parse.stage_keys` does, but without importing the dataclasses.

    Args:
        stage: Name of the stage.

    Returns:
        Name -> declaration.
    """
    classes = (STAGES[stage].arguments, STAGES[stage].trainer, "trl:ModelConfig", STAGES[stage].release)
    keys = {name: key for reference in classes for name, key in _declared_fields(reference).items()}
    excluded_names = refused_keys(stage).union(RUN_KEYS)
    accepted_keys = ((name, key) for name, key in keys.items() if name not in excluded_names)
    return {name: replace(key, help=HELP.get((stage, name), key.help)) for name, key in accepted_keys}


@functools.cache
def declared_recipe_keys() -> Mapping[str, DeclaredKey]:
    """Returns every key of recipe.yaml: as `parse.recipe_keys` does, but without importing the dataclasses.

    Returns:
        Name -> declaration. A key under `evaluation:` has the name evaluation.KEY.
    """
    keys = _declared_fields(f"{PACKAGE}.runs.settings.parse:RecipeConfig")
    del keys["evaluation"]
    evaluation = _declared_fields(f"{PACKAGE}.runs.settings.evaluation:EvaluationConfig")
    return keys | {f"evaluation.{name}": key for name, key in evaluation.items()}


def model_defaults() -> dict[str, Any]:
    """Returns the default of every key of trl's ModelConfig, including keys that no stage takes."""
    return {name: key.default for name, key in _declared_fields("trl:ModelConfig").items()}


def default_of(stage: str, key: str) -> Any:
    """Returns the default of a key, which applies if a run or card does not set the key.

    Args:
        stage: Name of the stage.
        key: A key whose default is a literal.
    """
    return declared_keys(stage)[key].default


@functools.cache
def refused_keys(stage: str) -> frozenset[str]:
    """Returns the keys of a stage's dataclasses that the stage refuses, because it would ignore or misreport them.

    Args:
        stage: Name of the stage.
    """
    return frozenset({*SCRIPT_KEYS, *REFUSAL_TEXTS, *_declared_fields("trl:ModelConfig")} - {*STAGES[stage].model_keys})


@functools.cache
def _enum_type(annotation: str) -> Any:
    """Returns the type for "NAME | str", if transformers has the enumeration NAME; None for any other annotation."""
    name, _, alternative = annotation.partition(" | ")
    if alternative != "str" or not name.isidentifier():
        return None
    try:
        _, tree = _find_class("transformers", name)
    except LookupError:
        return None
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    members = {
        entry.targets[0].id: _literal(entry.value)
        for entry in node.body
        if isinstance(entry, ast.Assign) and isinstance(entry.targets[0], ast.Name)
    }
    return enum.Enum(name, members, type=str) | str


def _declared_fields(reference: str) -> dict[str, DeclaredKey]:
    """Returns the declared fields of the dataclass "module:name", inherited fields first."""
    module, _, name = reference.partition(":")
    path, tree = _find_class(module, name)
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    is_own = _module_name(path).startswith(f"{PACKAGE}.")
    fields: dict[str, DeclaredKey] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name):
            fields |= _declared_fields(f"{_module_of(base.id, path, tree)}:{base.id}")
    # If branches of the class body assign a name several values, the last one counts.
    assigned_values = {
        entry.targets[0].id: entry.value
        for entry in ast.walk(node)
        if isinstance(entry, ast.Assign) and isinstance(entry.targets[0], ast.Name)
    }
    for entry in node.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        if (key := _declaration(entry, assigned_values)) is not None:
            fields[entry.target.id] = replace(key, is_own=is_own)
    return fields


@functools.cache
def _find_class(module: str, name: str) -> tuple[Path, ast.Module]:
    """Returns the file in which a module or one of its submodules defines a class, and the file's syntax tree."""
    package, *submodules = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent.joinpath(*submodules)
    files = [root.with_suffix(".py")] if submodules else [*root.glob("*.py"), *root.glob("trainer/*.py")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        if f"\nclass {name}(" in text or f"\nclass {name}:" in text:
            return path, ast.parse(text)
    raise LookupError(f"{module} has no class {name}")


def _module_of(name: str, path: Path, tree: ast.Module) -> str:
    """Returns the module from which a file imports a base class, or the file's own module."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            package = _module_name(path).split(".")[: -node.level] if node.level else []
            return ".".join([*package, *filter(None, [node.module])])
    return _module_name(path)


def _module_name(path: Path) -> str:
    """Returns the full name of the module in a file."""
    parts = [path.stem]
    while (path.parent / "__init__.py").is_file():
        path = path.parent
        parts.insert(0, path.name)
    return ".".join(parts)


def _declaration(entry: ast.AnnAssign, assigned_values: Mapping[str, ast.expr]) -> DeclaredKey | None:
    """Returns a field's declaration; None if the constructor does not take the field."""
    annotation = ast.unparse(entry.annotation).strip("'\"")
    if annotation.startswith("ClassVar"):
        return None
    value = entry.value
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("field", "option")):
        return DeclaredKey(annotation, _literal(value), "")
    if value.func.id == "option":  # option(DEFAULT, HELP)
        return DeclaredKey(annotation, *map(_literal, value.args))
    field_arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    if "init" in field_arguments and _literal(field_arguments["init"]) is False:
        return None
    default = field_arguments.get("default")
    if isinstance(default, ast.Name):
        default = assigned_values.get(default.id, default)
    metadata = dict(_dict_items(field_arguments.get("metadata")))
    return DeclaredKey(annotation, _literal(default), str(_literal(metadata.get("help")) or ""))


def _dict_items(node: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), value


def _literal(node: ast.expr | None) -> Any:
    """Returns the value of a literal, or the source text of any other expression."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
