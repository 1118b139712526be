"""The files of a comparison Space, and its models by the lineage of a PPO checkpoint.

A Space's builder installs requirements.txt before it copies the repository, so a relative path would not exist yet. The
file therefore names our wheel by its URL in the Space, with a digest: without it, a builder would keep an older wheel
of the same version. The builder sends no token, so a private Space contains the unpacked wheel next to app.py instead.
A Hub that only stores Spaces gets the path: `pip install -r requirements.txt` then works in a checkout.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import ZooError
from ...evaluation.votes.data import HubVotes
from ...fileio import read_json, write_json, write_text
from ...hub.client.connect import Hub
from ...hub.client.refusals import refusals_as
from ...modeling.remote_code import FLAG, brings_code
from ...publishing.catalog.ablation import find_runs
from ...publishing.catalog.card import Card, clean
from ...publishing.catalog.family import Node
from ...publishing.catalog.lineage import find_family
from .chosen import CHOSEN, SCHEMA
from .wheel import make_wheel, unpack

CPU, ZERO_GPU = "cpu-basic", "zero-a10g"
SHORT_STATIC = "Completions of SFT and PPO, with reward and log-ratio"
_MODELS_HERE = "<!-- models -->\n"
_ZERO_GPU_PYTHON = "3.12"  # it has 3.10 and 3.12, and this package needs 3.11
_ROLES = {"ppo": "PPO", "sft": "SFT", "reward": "reward model"}

#: How a Space gets our wheel: by its URL, by its path, or unpacked into the repository.
Layout = Literal["address", "path", "files"]


class Pinned(NamedTuple):
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
        card: rlhf_card.json of the PPO checkpoint, {} without one. Its texts are not trusted.
        votes: The data set that receives blind votes; None stores none.
        runs: The other PPO repositories of the ablation. The page shows what they have published when it starts.
    """

    ppo: Pinned
    sft: Pinned
    reward: Pinned | None
    datasets: tuple[str, ...] = ()
    recipe: str | None = None
    card: Mapping[str, object] = field(default_factory=Card)
    votes: str | None = None
    runs: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, Pinned]:
        models = {"ppo": self.ppo, "sft": self.sft, "reward": self.reward}
        return {role: model for role, model in models.items() if model is not None}

    @property
    def named(self) -> dict[str, Pinned]:
        """Display name of each role -> model."""
        return {_ROLES[role]: model for role, model in self.roles.items()}

    @property
    def title(self) -> str:
        return f"{clean(self.recipe, 60)}: SFT and PPO" if self.recipe else "SFT and PPO, side by side"


def find_models(
    ppo: str, *, sft: str | None = None, reward: str | None = None, votes: str | None = None
) -> SpaceModels:
    """Finds the models of a PPO checkpoint at their commits, without fetching weights.

    Args:
        ppo: NAMESPACE/NAME[@TAG].
        sft: SFT model to use instead of that of the lineage.
        reward: Reward model to use instead of that of the lineage.
        votes: The data set for votes, which need not exist yet.

    Raises:
        ZooError: A model cannot be read, the checkpoint is not a PPO model, nothing names its SFT model, or `votes` is
            not a valid repository id.
    """
    votes = None if votes is None else HubVotes(votes).name
    root = _published(ppo)
    card = root.card
    if not card.is_ppo:
        stage = clean(str(card["stage"]))
        raise ZooError(
            f"{ppo} is a checkpoint of the stage {stage}, not of PPO: pass the PPO model that was trained from it."
        )
    parents = {node.reference.role: node for node in root.parents}
    base = _named_model(sft, "sft") if sft is not None else _parent(ppo, parents.get("sft"), "sft")
    if base is None:
        raise ZooError(f"{ppo} does not name the SFT model it started from: name it with --sft.")
    scorer = _named_model(reward, "reward") if reward is not None else _parent(ppo, parents.get("reward"), "reward")
    data = [node.reference.repo for node in _walk(root) if node.reference.role == "data" and not node.member.problem]
    return SpaceModels(
        _pinned(root), base, scorer, tuple(dict.fromkeys(repo for repo in data if repo)), card.recipe, card, votes
    )


def with_runs(models: SpaceModels, names: Sequence[str] | None = None) -> tuple[SpaceModels, str | None]:
    """Adds the other runs of the ablation.

    Runs that `find_runs` finds are skipped if they have no checkpoint, or if they are private while the PPO model is
    public: they would make the Space private.

    Args:
        models: What the Space shows.
        names: The runs; None to find them.

    Returns:
        The models with the runs; and why some runs are missing, or None.

    Raises:
        ZooError: `find_runs` refuses a name.
    """
    ablation = find_runs(models.ppo.repo, models.card, names=names)
    shown_run, *other_runs = ablation.runs
    problems = [ablation.problem] if ablation.problem is not None else []
    if names is None:
        other_runs = [run for run in other_runs if run.steps]
        hidden = [run.repo for run in other_runs if run.private and not shown_run.private]
        other_runs = [run for run in other_runs if run.repo not in hidden]
        if hidden:
            problems.append(f"Not shown, because they are private and {shown_run.repo} is public: {', '.join(hidden)}.")
    return replace(models, runs=tuple(run.repo for run in other_runs)), " ".join(problems) or None


def _published(name: str) -> Node:
    if Path(name).is_dir():
        raise ZooError(f"{name} is a local folder, and a Space shows published models: pass NAMESPACE/NAME.")
    return find_family(name)


def _named_model(name: str, role: str) -> Pinned:
    node = _published(name)
    if node.stage is not None and (node.stage == "reward") != (role == "reward"):
        kind_of_model = "a reward model" if role == "reward" else "a policy"
        raise ZooError(f"{name} is a checkpoint of the stage {node.stage}; --{role} takes {kind_of_model}.")
    return _pinned(node)


def _pinned(node: Node) -> Pinned:
    assert node.reference.repo is not None
    assert node.member.commit is not None
    return Pinned(node.reference.repo, node.member.commit)


def check_code(models: SpaceModels, hub: Hub) -> None:
    """Checks that no model needs custom code, because a Space has no way to confirm that it may run.

    Args:
        models: What the Space shows.
        hub: The Hub with the models.

    Raises:
        ZooError: A model needs such code.
    """
    for model in models.roles.values():
        with refusals_as(f"Cannot fetch the configuration of {model.repo} from {hub.name}", "try again."):
            infos = hub.api().get_paths_info(model.repo, ["config.json"], revision=model.commit)
            path = hub.file(model.repo, "config.json", revision=model.commit) if infos else None
        if path is not None and brings_code(read_json(path)):
            raise ZooError(
                f"The model {model.name} needs custom code, and a Space has no way to confirm that you trust it: read "
                f"the code, and serve the page here with `rlhf-zoo compare NAME {FLAG}`."
            )


def _parent(child: str, node: Node | None, role: str) -> Pinned | None:
    if node is None:
        return None
    model_kind = {"sft": "SFT model", "reward": "reward model"}[role]
    if node.reference.repo is None:
        raise ZooError(f"The {model_kind} of {child} was never published: name a copy of it with --{role}.")
    if node.member.problem is not None or node.member.commit is None:
        problem = clean(node.member.problem or "was not read")
        raise ZooError(f"The {model_kind} of {child}, {node.reference.repo}, {problem}: name another with --{role}.")
    return _pinned(node)


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for parent in node.parents:
        yield from _walk(parent)


# The files


def space_folder() -> Path:
    """Finds the template files of the Space: in the wheel, else in the repository.

    Raises:
        ZooError: The installation lacks them.
    """
    package = Path(__file__).parents[2]
    folders = (package / "_spaces", package.parent / "spaces")
    app_folder = next((parent / "compare" for parent in folders if (parent / "compare" / "app.py").is_file()), None)
    if app_folder is None:
        raise ZooError("This installation lacks the comparison page (compare/app.py): install rlhf-zoo again.")
    return app_folder


def write_space(
    folder: Path,
    models: SpaceModels,
    *,
    space: str,
    endpoint: str,
    layout: Layout = "path",
    hardware: str = CPU,
) -> None:
    """Writes the files of a Gradio Space. Equal models and packages give equal bytes.

    Args:
        folder: An empty folder.
        models: The models to show.
        space: NAMESPACE/NAME.
        endpoint: Address of the Hub.
        layout: How the Space gets our wheel.
        hardware: The Space's hardware.
    """
    own = space_folder()
    shutil.copyfile(own / "app.py", folder / "app.py")
    write_json(folder / CHOSEN, _chosen(models, hardware))
    wheel = make_wheel(folder)
    if layout == "files":
        unpack(wheel, folder)
        wheel.unlink()
        line = None
    elif layout == "path":
        line = f"./{wheel.name}"
    else:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        line = f"rlhf-zoo @ {endpoint}/spaces/{space}/resolve/main/{wheel.name}#sha256={digest}"
    write_text(folder / "requirements.txt", _requirements(own / "requirements.txt", line, hardware=hardware))
    write_text(folder / "README.md", _readme(models, hardware=hardware))


def write_static(folder: Path, models: SpaceModels, page: str) -> None:
    """Writes the files of a static Space: one page with completions that were sampled before.

    Args:
        folder: An empty folder.
        models: The models to show.
        page: The HTML of the page.
    """
    models = replace(models, votes=None, runs=())  # a static page can neither store votes nor sample other runs
    write_json(folder / CHOSEN, _chosen(models, None))
    write_text(folder / "index.html", page)
    write_text(folder / "README.md", _static_readme(models))


def _chosen(models: SpaceModels, hardware: str | None) -> dict[str, Any]:
    names = {role: models.roles[role].name if role in models.roles else None for role in _ROLES}
    return {"schema": SCHEMA, **names, "votes": models.votes, "runs": list(models.runs), "hardware": hardware}


def _requirements(template: Path, wheel: str | None, *, hardware: str) -> str:
    """Returns requirements.txt: the packages of the template at the versions that are installed here."""
    lines = ["# The versions that were installed when this Space was deployed."]
    for line in template.read_text(encoding="utf-8").splitlines():
        name, pinned, version = line.partition("==")
        if not pinned or line.startswith("#"):
            continue
        if name == "torch" and hardware == ZERO_GPU:
            continue  # ZeroGPU has its own build of torch
        # A local version label such as 2.13.0+cpu exists on no package index.
        lines.append(f"{name}=={(_installed(name) or version).partition('+')[0]}")
    return "\n".join([*lines, *([wheel] if wheel else []), ""])


def _installed(name: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _front_matter(models: SpaceModels, **fields: Any) -> tuple[str, str]:
    """Returns the front matter of the Space's README with these fields (None removes one), and the body below it."""
    import yaml

    _, template, body = (space_folder() / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    head = {
        **yaml.safe_load(template),
        "title": models.title,
        "models": list(dict.fromkeys([*(model.repo for model in models.roles.values()), *models.runs])),
        "datasets": list(dict.fromkeys([*models.datasets, *([models.votes] if models.votes else [])])),
        **fields,
    }
    head = {key: value for key, value in head.items() if value is not None}
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=1000)}---\n", body


def _readme(models: SpaceModels, *, hardware: str) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}" if hardware == CPU else _ZERO_GPU_PYTHON
    gradio = {"sdk_version": version} if (version := _installed("gradio")) else {}
    front, body = _front_matter(models, python_version=python, suggested_hardware=hardware, **gradio)
    body = body.replace(_MODELS_HERE, _models_table(models)).replace("NAMESPACE/NAME-ppo", models.ppo.repo)
    return front + body


def _static_readme(models: SpaceModels) -> str:
    front, _ = _front_matter(
        models,
        sdk="static",
        app_file="index.html",
        short_description=SHORT_STATIC,
        sdk_version=None,
        python_version=None,
        suggested_hardware=None,
    )
    return (
        f"{front}\n# SFT and PPO, side by side\n\n"
        "Completions of held-out prompts by an SFT policy and by the PPO policy that was trained from it, with rewards "
        "and log-ratios, and the evaluation of the PPO model. The page is static; `rlhf-zoo compare` opens an "
        "interactive one for your own prompts:\n\n"
        f"```sh\nrlhf-zoo compare {models.ppo.repo}\n```\n\n{_models_table(models)}"
    )


def _models_table(models: SpaceModels) -> str:
    rows = [f"| {role} | `{model.repo}` | `{model.commit}` |" for role, model in models.named.items()]
    rows += [f"| run of the ablation | `{repo}` | the tag of every step |" for repo in models.runs]
    rows += [f"| votes | data set `{models.votes}` | `main` |"] if models.votes else []
    return "\n".join(["| model | repository | commit |", "|---|---|---|", *rows, ""])
