"""The table of the package's recipes: models, data, published figures, and hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ZooError
from .recipe import Recipe, list_recipes, list_registered_recipes, load_recipe

#: The values of `hardware` in zoo.yaml, by which the table groups recipes.
HARDWARE = ("a laptop, in minutes", "a laptop, in hours", "one GPU", "several GPUs")
BEGIN, END = "<!-- recipes -->", "<!-- /recipes -->"
COMMAND = "rlhf-zoo recipes list --readme recipes/README.md"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Name of the recipe.
        stages: Names of the recipe's stages.
        simulated: Whether a program simulates the human judgments.
        description: What the recipe shows, in a sentence.
        hardware: One of `HARDWARE`.
        memory: Memory needed per device.
        model: The model that SFT starts from, or PPO in a recipe without SFT; "new, tiny" if the recipe names none.
        data: The data set that the recipe names, otherwise its corpus, otherwise "of --dataset_name".
        license: Licenses of model and data.
        source: Where others published the recipe and its figures; None if nobody did.
        published: Figures that others published, or None.
        ours: Our figures; None before a run.
        smoke: The tests that run `rlhf-zoo smoke` on the recipe, or None.
        package: NAME VERSION of another package that registers the recipe, or None.
    """

    name: str
    stages: Sequence[str]
    simulated: bool
    description: str
    hardware: str
    memory: str
    model: str
    data: str
    license: str
    source: str | None
    published: str | None
    ours: str | None
    smoke: str | None
    package: str | None = None


def recipe_rows() -> list[Row]:
    """Returns every recipe of this package, sorted by the hardware that it needs."""
    return _by_hardware([_row(load_recipe(name)) for name in list_recipes()])


def rows_of_other_packages() -> tuple[list[Row], list[str]]:
    """Returns the valid recipes of other packages, and a sentence about each invalid one."""
    rows, problems = [], []
    for name in list_registered_recipes():
        try:
            rows.append(_row(load_recipe(name)))
        except ZooError as error:
            problems.append(f"The recipe {name!r} of an installed package is left out: {error}")
    return _by_hardware(rows), problems


def _by_hardware(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: HARDWARE.index(row.hardware))


def _row(recipe: Recipe) -> Row:
    zoo, file = recipe.zoo, recipe.yaml_file("zoo")
    if missing := next((key for key in ("hardware", "memory", "license") if zoo.get(key) is None), None):
        raise ZooError(f"{file} has no {missing}, which the list of recipes shows: add it.")
    if zoo.get("hardware") not in HARDWARE:
        raise ZooError(f"{file} has hardware {zoo.get('hardware')!r}: choose {' or '.join(HARDWARE)}.")
    first_stage: Mapping[str, Any] = recipe.stages.get("sft") or recipe.stages.get("ppo", {})
    corpus = str(recipe.shared.get("corpus") or "").partition(":")[0].rpartition(".")[2].replace("_", "-")
    return Row(
        name=recipe.name,
        stages=list(recipe.stages),
        simulated=bool(recipe.shared.get("simulated")),
        description=str(recipe.shared.get("description", "")),
        hardware=zoo["hardware"],
        memory=str(zoo["memory"]),
        model=first_stage.get("model_name_or_path") or "new, tiny",
        data=recipe.shared.get("dataset_name") or corpus or "of --dataset_name",
        license=str(zoo["license"]),
        source=zoo.get("source"),
        published=zoo.get("published"),
        ours=zoo.get("ours"),
        smoke=zoo.get("smoke"),
        package=" ".join(recipe.package.values()) or None,
    )


def insert_table(text: str) -> str:
    """Puts the table between the markers of a README.

    Args:
        text: The README.

    Raises:
        ZooError: The README does not have exactly one pair of markers.
    """
    before, _, table_and_after = text.partition(BEGIN)
    _, end_marker, after = table_and_after.partition(END)
    if not end_marker or BEGIN in after or END in before + after:
        raise ZooError(
            f"The README needs exactly one {BEGIN} before exactly one {END}: leave one of each around the table."
        )
    return f"{before}{BEGIN}\n{_table()}\n{END}{after}"


def _table() -> str:
    columns = ("recipe", "stages", "model", "data", "license", "published", "ours", "memory", "smoke")
    lines = [f"Made by `{COMMAND}`."]
    for hardware in HARDWARE:
        lines += ["", f"Runs on {hardware}:", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for row in recipe_rows():
            if row.hardware == hardware:
                cells = (
                    f"[{row.name}]({row.name}/README.md)", ", ".join(row.stages), row.model, row.data, row.license,
                    row.published or "–", row.ours or "not yet", row.memory, row.smoke or "none",
                )  # fmt: skip
                lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Published: by others, at the source that the recipe's README names. Licenses: as read, not checked again. "
        "Memory: per device, according to `rlhf-zoo plan` (docs/plan.md), not yet measured on a GPU; on a CPU, "
        "libraries take another half GiB. Smoke: the tests in which `rlhf-zoo smoke` trains a miniature of it.",
    ]
    return "\n".join(lines)
