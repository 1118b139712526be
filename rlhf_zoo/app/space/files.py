"""Finds the models of a comparison Space from the lineage of a PPO checkpoint, and writes the Space's files.

A Space gets the wheel of this package in one of three ways (`WheelSource`). The Space's builder installs
requirements.txt before it copies the repository, so the file cannot name the wheel by a relative path. It names the
wheel by its URL in the Space, with a digest, because a builder would otherwise keep an older wheel of the same version.
The builder sends no token, so a private Space contains the unpacked wheel next to app.py instead. On a Hub that only
stores Spaces, the file names the wheel by its path, so that `pip install -r requirements.txt` works in a copy of the
repository.
"""

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from ...errors import ZooError
from ...evaluation.votes.data import HubVotes
from ...fileio import write_json, write_text
from ...publishing.catalog.ablation import find_runs
from ...publishing.catalog.card import Card, clean
from ...publishing.catalog.family import Node
from ...publishing.catalog.lineage import find_family
from .model_names import MODELS_FILE, SCHEMA
from .wheel import make_wheel

CPU, ZERO_GPU = "cpu-basic", "zero-a10g"
STATIC_DESCRIPTION = "Completions before and after PPO, with reward and log-ratio"
_MODELS_PLACEHOLDER = "<!-- models -->\n"
_ZERO_GPU_PYTHON = "3.12"  # ZeroGPU offers 3.10 and 3.12, and this package needs at least 3.11
_ROLE_LABELS = {"ppo": "PPO", "sft": "SFT", "reward": "reward model"}

#: How a Space gets the wheel of this package: by its URL, by its path, or unpacked into the repository.
WheelSource = Literal["address", "path", "files"]


class PinnedModel(NamedTuple):
    """A published model at a commit."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.commit}"


@dataclass(frozen=True)
class SpaceModels:
    """The models that a Space shows.

    Attributes:
        ppo: The PPO model.
        sft: The SFT model.
        reward: The reward model; None if PPO was trained without one.
        datasets: The data sets of the lineage.
        recipe: Name of the recipe; None if no card names it.
        card: rlhf_card.json of the PPO checkpoint; {} if there is none. Its texts are not trusted.
        votes: The data set that receives the votes of the blind test; None if votes are not stored.
        runs: The other PPO repositories of the ablation. The page looks up their published steps when it starts.
    """

    ppo: PinnedModel
    sft: PinnedModel
    reward: PinnedModel | None
    datasets: tuple[str, ...] = ()
    recipe: str | None = None
    card: Mapping[str, object] = field(default_factory=Card)
    votes: str | None = None
    runs: tuple[str, ...] = ()

    @property
    def by_role(self) -> dict[str, PinnedModel]:
        """Role (ppo, sft or reward) -> model. Roles without a model are left out."""
        models = {"ppo": self.ppo, "sft": self.sft, "reward": self.reward}
        return {role: model for role, model in models.items() if model is not None}

    @property
    def by_role_label(self) -> dict[str, PinnedModel]:
        """Label of each role on the page -> model."""
        is_base = Card(self.card).started_from_base
        return {
            "base model" if role == "sft" and is_base else _ROLE_LABELS[role]: model
            for role, model in self.by_role.items()
        }

    @property
    def title(self) -> str:
        card = Card(self.card)
        return f"{clean(self.recipe, 60)}: {card.initial_policy} and PPO" if self.recipe else card.comparison_title


def find_models(
    ppo: str, *, sft: str | None = None, reward: str | None = None, votes: str | None = None
) -> SpaceModels:
    """Finds the models of a PPO checkpoint at their commits, without fetching weights.

    Args:
        ppo: NAMESPACE/NAME[@TAG].
        sft: SFT model; None for the one in the lineage.
        reward: Reward model; None for the one in the lineage.
        votes: The data set for votes, which need not exist yet; None if votes are not stored.

    Raises:
        ZooError: A model cannot be read, the checkpoint is not a PPO model, neither card nor `sft` names its SFT
            model, or `votes` is not a valid repository id.
    """
    votes = None if votes is None else HubVotes(votes).name
    root = _find_published_node(ppo)
    card = root.card
    if not card.is_ppo:
        stage = clean(str(card["stage"]))
        raise ZooError(
            f"{ppo} is a checkpoint of the stage {stage}, not of PPO: pass a PPO model that was trained from it."
        )
    sft_model = _find_model("sft", sft, ppo, root)
    if sft_model is None:
        raise ZooError(f"{ppo} does not name the SFT model it started from: name it with --sft.")
    data_repos = [
        node.entry.repo
        for node in _iterate_with_ancestors(root)
        if node.entry.role == "data" and not node.member.problem
    ]
    return SpaceModels(
        ppo=_pin(root),
        sft=sft_model,
        reward=_find_model("reward", reward, ppo, root),
        datasets=tuple(dict.fromkeys(repo for repo in data_repos if repo)),
        recipe=card.recipe,
        card=card,
        votes=votes,
    )


def add_runs(models: SpaceModels, names: Sequence[str] | None = None) -> tuple[SpaceModels, str | None]:
    """Adds the other runs of the ablation.

    Without `names`, a run is skipped if it has no checkpoint. A private run is skipped too if the PPO model is public,
    because it would make the Space private.

    Args:
        models: The models of the Space.
        names: The runs; None to look them up on the Hub.

    Returns:
        (the models with the runs, why some runs are missing or None).

    Raises:
        ZooError: A name is not a run that the page can show.
    """
    ablation = find_runs(models.ppo.repo, models.card, names=names)
    own_run, *other_runs = ablation.runs  # `find_runs` returns the run of the PPO model first
    problems = [ablation.problem] if ablation.problem is not None else []
    if names is None:
        other_runs = [run for run in other_runs if run.steps]
        private_repos = [run.repo for run in other_runs if run.private and not own_run.private]
        other_runs = [run for run in other_runs if run.repo not in private_repos]
        if private_repos:
            problems.append(
                f"Not shown, because they are private and {own_run.repo} is public: {', '.join(private_repos)}."
            )
    return replace(models, runs=tuple(run.repo for run in other_runs)), " ".join(problems) or None


def _find_published_node(name: str) -> Node:
    if Path(name).is_dir():
        raise ZooError(f"{name} is a local folder, but a Space shows published models: pass NAMESPACE/NAME.")
    return find_family(name)


def _find_named_model(name: str, role: str) -> PinnedModel:
    node = _find_published_node(name)
    if node.stage is not None and (node.stage == "reward") != (role == "reward"):
        model_kind = "a reward model" if role == "reward" else "a policy"
        raise ZooError(f"{name} is a checkpoint of the stage {node.stage}; --{role} takes {model_kind}.")
    return _pin(node)


def _pin(node: Node) -> PinnedModel:
    # The callers have checked that the node is a readable repository.
    assert node.entry.repo is not None
    assert node.member.commit is not None
    return PinnedModel(node.entry.repo, node.member.commit)


def _find_model(role: str, name: str | None, child_name: str, child_node: Node) -> PinnedModel | None:
    """Returns the model `name`; without a name, the child's parent of this role, or None if its card names none."""
    if name is not None:
        return _find_named_model(name, role)
    node = {parent.entry.role: parent for parent in child_node.parents}.get(role)
    if node is None:
        return None
    model_kind = {"sft": "SFT model", "reward": "reward model"}[role]
    if node.entry.repo is None:
        raise ZooError(f"The {model_kind} of {child_name} was never published: name a copy of it with --{role}.")
    if node.member.problem is not None or node.member.commit is None:
        problem = clean(node.member.problem or "was not read")
        raise ZooError(f"The {model_kind} of {child_name}, {node.entry.repo}, {problem}: name another with --{role}.")
    return _pin(node)


def _iterate_with_ancestors(node: Node) -> Iterator[Node]:
    yield node
    for parent in node.parents:
        yield from _iterate_with_ancestors(parent)


# Writing the files


def find_space_folder() -> Path:
    """Finds the folder with the Space's template files: in the installed package, or in the repository.

    Raises:
        ZooError: The installation lacks these files.
    """
    package = Path(__file__).parents[2]
    folders = (package / "_spaces", package.parent / "spaces")
    app_folder = next((folder / "compare" for folder in folders if (folder / "compare" / "app.py").is_file()), None)
    if app_folder is None:
        raise ZooError("This installation lacks the comparison page (compare/app.py): install rlhf-zoo again.")
    return app_folder


def write_space(
    folder: Path,
    models: SpaceModels,
    *,
    space: str,
    endpoint: str,
    wheel_source: WheelSource = "path",
    hardware: str = CPU,
) -> None:
    """Writes the files of a Gradio Space. Equal models and packages give equal bytes.

    Args:
        folder: An empty folder.
        models: The models to show.
        space: NAMESPACE/NAME.
        endpoint: Address of the Hub.
        wheel_source: How the Space gets the wheel of this package.
        hardware: The Space's hardware.
    """
    templates = find_space_folder()
    shutil.copyfile(templates / "app.py", folder / "app.py")
    write_json(folder / MODELS_FILE, _models_json(models, hardware))
    wheel = make_wheel(folder)
    if wheel_source == "files":
        _unpack_wheel(wheel, folder)
        wheel.unlink()
        requirement = None
    elif wheel_source == "path":
        requirement = f"./{wheel.name}"
    else:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        requirement = f"rlhf-zoo @ {endpoint}/spaces/{space}/resolve/main/{wheel.name}#sha256={digest}"
    requirements = _requirements_text(templates / "requirements.txt", requirement, hardware=hardware)
    write_text(folder / "requirements.txt", requirements)
    write_text(folder / "README.md", _readme_text(models, hardware=hardware))


def _unpack_wheel(wheel: Path, folder: Path) -> None:
    """Unpacks a wheel, so that a program in the folder can import the package and find the package's entry points."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def write_static(folder: Path, models: SpaceModels, page: str) -> None:
    """Writes the files of a static Space: one page, which already contains the completions.

    Args:
        folder: An empty folder.
        models: The models to show.
        page: The HTML of the page.
    """
    models = replace(models, votes=None, runs=())  # a static page can neither store votes nor sample other runs
    write_json(folder / MODELS_FILE, _models_json(models, None))
    write_text(folder / "index.html", page)
    write_text(folder / "README.md", _static_readme_text(models))


def _models_json(models: SpaceModels, hardware: str | None) -> dict[str, object]:
    """Returns the content of compare.json."""
    names = {role: models.by_role[role].name if role in models.by_role else None for role in _ROLE_LABELS}
    return {"schema": SCHEMA, **names, "votes": models.votes, "runs": list(models.runs), "hardware": hardware}


def _requirements_text(template: Path, wheel_requirement: str | None, *, hardware: str) -> str:
    """Returns requirements.txt: the template's packages at their installed versions, and the wheel.

    A package that is not installed keeps the template's version.
    """
    lines = ["# The versions that were installed when this Space was deployed."]
    for line in template.read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if not equals or line.startswith("#"):
            continue
        if name == "torch" and hardware == ZERO_GPU:
            continue  # ZeroGPU has its own build of torch
        # A local version label such as 2.13.0+cpu exists on no package index.
        lines.append(f"{name}=={(_installed_version(name) or version).partition('+')[0]}")
    return "\n".join([*lines, *([wheel_requirement] if wheel_requirement else []), ""])


def _installed_version(name: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _split_readme(models: SpaceModels, **fields: str | None) -> tuple[str, str]:
    """Returns the front matter of the Space's README with these fields, and the body below. None removes a field."""
    import yaml

    _, template, body = (find_space_folder() / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    front_matter = {
        **yaml.safe_load(template),
        "title": models.title,
        "models": list(dict.fromkeys([*(model.repo for model in models.by_role.values()), *models.runs])),
        "datasets": list(dict.fromkeys([*models.datasets, *([models.votes] if models.votes else [])])),
        **fields,
    }
    front_matter = {key: value for key, value in front_matter.items() if value is not None}
    return f"---\n{yaml.safe_dump(front_matter, sort_keys=False, allow_unicode=True, width=1000)}---\n", body


def _readme_text(models: SpaceModels, *, hardware: str) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}" if hardware == CPU else _ZERO_GPU_PYTHON
    gradio = _installed_version("gradio")
    sdk_fields = {"sdk_version": gradio} if gradio else {}
    front_matter, body = _split_readme(models, python_version=python, suggested_hardware=hardware, **sdk_fields)
    body = body.replace(_MODELS_PLACEHOLDER, _models_table(models)).replace("NAMESPACE/NAME-ppo", models.ppo.repo)
    return front_matter + body


def _static_readme_text(models: SpaceModels) -> str:
    front_matter, _ = _split_readme(
        models,
        sdk="static",
        app_file="index.html",
        short_description=STATIC_DESCRIPTION,
        sdk_version=None,
        python_version=None,
        suggested_hardware=None,
    )
    card = Card(models.card)
    return (
        f"{front_matter}\n# {card.comparison_title}\n\n"
        f"Completions of held-out prompts by {card.initial_policy} and the PPO policy that was trained from it, with "
        "rewards and log-ratios, and the evaluation of the PPO model. The page is static. `rlhf-zoo compare` opens an "
        "interactive page for your own prompts:\n\n"
        f"```sh\nrlhf-zoo compare {models.ppo.repo}\n```\n\n{_models_table(models)}"
    )


def _models_table(models: SpaceModels) -> str:
    rows = [f"| {role} | `{model.repo}` | `{model.commit}` |" for role, model in models.by_role_label.items()]
    rows += [f"| run of the ablation | `{repo}` | the tag of every step |" for repo in models.runs]
    rows += [f"| votes | data set `{models.votes}` | `main` |"] if models.votes else []
    return "\n".join(["| model | repository | commit |", "|---|---|---|", *rows, ""])
