"""Writes a recipe for a user's model and data, with values chosen from their files."""

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...errors import ZooError
from ...evaluation.judges.named import check_names, check_outputs
from ...evaluation.judges.panel import split_label
from ...evaluation.verdict import FEWEST
from ...modeling.chat import append_completion, tokenize_for_reward, tokenize_prompt
from ...modeling.chat_template import Chat
from ...modeling.devices import best_device, has_bfloat16
from ...modeling.prompt_keys import prompt_key
from ...plugins import REWARDS, did_you_mean, load_object
from ...rewards.verifiable import Verifiable
from ...runs.data.layout import as_turns, sft_text
from ...runs.recipe import Recipe, load_recipe
from ...runs.registry import STAGES
from ...runs.settings.declared import declared_keys
from ...runs.settings.evaluation import LLMConfig
from ...runs.settings.judge_names import SAME_LABELS
from ..plan.devices import Device, local_device
from ..plan.memory import BFLOAT16, FLOAT32, GIB
from ..plan.plan import Plan, gib, make_plan
from .data import MAX_COUNTED, InspectedData, StageData, inspect_data, stage_data
from .model import ModelFacts, inspect_model, reward_labels
from .request import RecipeRequest, check_folder

TEMPLATES = Path(__file__).parent / "templates"
#: GiB of GPU memory to assume if there is no GPU and --memory is not given.
ASSUMED_GIB = 24.0
#: The largest share of a GPU's memory for the KV cache.
CACHE_SHARE = 0.25
#: Settings of LoRA.
RANK = 16
MAX_PROMPTS, MAX_EPISODES, MAX_RESPONSE, MAX_TOKENS = 200, 20_000, 256, 1024
#: The smallest number of distinct prompts; some of them are held out.
MIN_PROMPTS = 8
#: Completions of an update and of a micro-batch.
ROLLOUT, MICRO_BATCH = 64, 4
#: The share of the pairs for the judge same-labels.
JUDGE_SHARE = 0.3


@dataclass(frozen=True)
class NewRecipe:
    """A recipe that is not written yet.

    Attributes:
        files: Texts by file name.
        decisions: (setting, value, reason), in order.
        plan: What the recipe needs.
    """

    files: Mapping[str, str]
    decisions: Sequence[tuple[str, str, str]]
    plan: Plan


@dataclass
class _Decisions:
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, setting: str, value: Any, reason: str) -> None:
        self.rows.append((setting, str(value), reason))


def make_recipe(request: RecipeRequest, *, title: str) -> NewRecipe:
    """Inspects the model and the data, and chooses the recipe's settings.

    Args:
        request: What the recipe is to use.
        title: Its name.

    Raises:
        ZooError: No recipe fits the request.
    """
    decisions = _Decisions()
    request.check()
    functions, reward_model = request.functions, next(iter(request.models), None)
    if request.judge is not None:
        check_names([request.judge], LLMConfig(), hub=None)
    for name in functions:
        load_object(name, group=REWARDS)
    model = inspect_model(request.model)
    readings = _stage_data(request)
    conversational, chat = _conversations(model, readings, decisions)
    _describe_model(model, decisions)
    for stage, reading in readings.items():
        columns = ", ".join(f"{ours} from {theirs}" for ours, theirs in reading.keys["columns"].items())
        split = reading.keys["dataset_train_split"]
        where = ":".join(filter(None, (reading.data.name, reading.keys["dataset_config"], split)))
        prefix = "at least " if reading.count == MAX_COUNTED else ""
        of = "" if reading.prompts == reading.count else f" of {reading.prompts:,} different prompts"
        reason = f"{prefix}{reading.count:,} rows{of}{f', {columns}' if columns else ''}"
        decisions.add(f"data of {stage}", where, reason)
    if conversational:
        chat.write(model.tokenizer)
    sizes = _sizes(model, readings, conversational, decisions)
    labels = [""] if reward_model is None else reward_labels(reward_model)
    label = labels[-1] if len(labels) > 1 else None
    if label is not None:
        decisions.add("reward_label", label, f"GUESSED: the last of {', '.join(labels)}; its output is the reward")
    judge = _judge(request, readings, decisions)
    description = {
        "title": title,
        "model": model,
        "readings": readings,
        "shared": readings["ppo" if "reward" not in readings else "reward"].data,
        "conversational": conversational and readings["ppo"].plain,
        "chat": chat if conversational else Chat(),
        "functions": functions,
        "reward_model": reward_model,
        "label": label,
        "sizes": sizes,
        "rank": RANK,
        "judge": judge,
        "judged": JUDGE_SHARE if judge.get("judge") == SAME_LABELS else None,
    }
    files, plan = _fitting(description, model, request, decisions)
    return NewRecipe(files, decisions.rows, plan)


def write(recipe: NewRecipe, folder: Path) -> None:
    """Checks the recipe, and writes it.

    Args:
        recipe: The recipe.
        folder: Where to write it; missing or empty.

    Raises:
        ZooError: The recipe is not valid, or the folder cannot be written.
    """
    check_folder(folder)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / os.path.basename(os.path.abspath(folder))
        copy.mkdir()
        for name, text in recipe.files.items():
            (copy / name).write_text(text, encoding="utf-8")
        _check(copy)
        try:
            shutil.copytree(copy, folder, dirs_exist_ok=True)
        except OSError as error:
            raise ZooError(f"{folder} cannot be written ({error.strerror or error}): choose another folder.") from error


def _check(folder: Path) -> None:
    from ...runs.checks.splits import check_forms
    from ...runs.settings.parse import recipe_config, stage_settings

    recipe = load_recipe(str(folder))
    stages = {
        stage: stage_settings(recipe, stage, {}, shared_flags={}, output_dir=Path("runs")) for stage in recipe.stages
    }
    check_forms(recipe_config(recipe), stages)


# Decisions


def _stage_data(request: RecipeRequest) -> dict[str, StageData]:
    """Chooses how each stage reads its data. Raises ZooError for a stage without data."""
    names = filter(None, (request.preferences, request.prompts, request.texts))
    inspected = {name: inspect_data(name) for name in dict.fromkeys(names)}
    samples = (rows for data in inspected.values() for subset in data.subsets for rows in subset.rows.values())
    columns = {column for rows in samples for row in rows[:1] for column in row}
    for ours, theirs in request.columns.items():
        if theirs not in columns:
            suggestion = did_you_mean(theirs, columns) or f": they have {', '.join(sorted(columns))}."
            raise ZooError(f"--columns maps {ours} to {theirs!r}, but the data have no such column{suggestion}")
    pairs = None
    if request.preferences is not None and not request.models:
        preferences = inspected[request.preferences]
        pairs = stage_data(preferences, "pairs", request.columns)
        if pairs is None:
            raise ZooError(
                f"{_columns_of(preferences)}, but preferences need the columns chosen and rejected: name them by "
                "--columns '{chosen: …, rejected: …, prompt: …}', or give another --preferences."
            )
    texts = [request.texts] if request.texts else [request.preferences, request.prompts]
    candidates = [inspected[name] for name in texts if name]
    readings = (stage_data(data, "texts", request.columns) for data in candidates)
    sft = next((reading for reading in readings if reading is not None), None)
    if sft is None:
        raise ZooError(
            f"{' and '.join(map(_columns_of, candidates))}, but SFT reads messages, prompt and completion, or text: "
            "give such data by --texts, or name the columns by --columns."
        )
    name = request.prompts or request.preferences
    assert name is not None  # `RecipeRequest.check` refuses this
    prompts = stage_data(inspected[name], "prompts", request.columns)
    if prompts is None:
        raise ZooError(
            f"{_columns_of(inspected[name])}, but PPO reads prompt, messages, or chosen and rejected: give other "
            "--prompts."
        )
    return {"sft": sft, **({} if pairs is None else {"reward": pairs}), "ppo": prompts}


def _columns_of(data: InspectedData) -> str:
    rows = next((rows for subset in data.subsets for rows in subset.rows.values() if rows), [{}])
    return f"The data set {data.name} has the columns {', '.join(rows[0])}"


def _conversations(model: ModelFacts, readings: Mapping[str, StageData], decisions: _Decisions) -> tuple[bool, Chat]:
    """Whether the model reads conversations, and how they are rendered."""
    stages = [stage for stage, reading in readings.items() if not reading.plain]
    if stages and not model.template:
        raise ZooError(
            f"The data of {stages[0]} are conversations, but {model.name} has no chat template: use a model that has "
            "one, or plain texts."
        )
    separate = all(reading.has_prompt or not reading.plain for reading in readings.values())
    conversational = model.template and separate
    kwargs = {"enable_thinking": False} if model.thinks else {}
    if conversational:
        reason = "the data are conversations" if stages else "the tokenizer has a chat template, and prompts a column"
        decisions.add("prompts", "conversations", f"{reason}; a plain prompt becomes a user turn")
        if kwargs:
            reason = "the template has this variable, and the answers have no thoughts"
            decisions.add("chat_template_kwargs", "enable_thinking: false", reason)
    else:
        reason = "the tokenizer has no chat template" if not model.template else "prompts and answers are one text"
        decisions.add("prompts", "plain texts", reason)
    return conversational, Chat(chat_template_kwargs=kwargs)


def _describe_model(model: ModelFacts, decisions: _Decisions) -> None:
    size = f"{model.parameters / 1e6:,.0f}M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    description = f"{model.architecture}, {size} parameters, {model.dtype}"
    decisions.add("model", description, f"config.json of {model.name}")
    decisions.add("context", model.context or "no bound", "tokens, by its configuration")
    tokenizer = model.tokenizer
    shared = tokenizer.pad_token in (None, tokenizer.eos_token)
    reason = "PAD: SFT chooses another, as it must differ from EOS" if shared else "PAD: the tokenizer's own"
    decisions.add("special tokens", f"EOS {tokenizer.eos_token}, PAD {tokenizer.pad_token}", reason)


def _sizes(
    model: ModelFacts, readings: Mapping[str, StageData], conversational: bool, decisions: _Decisions
) -> dict[str, Any]:
    """Lengths in tokens, batch sizes, and the number of held-out prompts."""
    context, tokenizer = model.context or MAX_TOKENS, model.tokenizer
    ppo = readings["ppo"]
    prompts: Iterable[Mapping[str, Any]] = map(as_turns, ppo.rows) if conversational else ppo.rows
    by_row = [(prompt_key(row["prompt"]), len(tokenize_prompt(row["prompt"], tokenizer))) for row in prompts]
    lengths = sorted(dict(by_row).values())
    texts, answers = _lengths(readings, tokenizer, conversational)
    usual, longest = _percentile_95(lengths), _percentile_95(texts)
    prompt = min(_round_up(usual), context - max(8, context // 8))
    response = min(MAX_RESPONSE, context - prompt)
    if answers:
        response = min(response, _round_up(2 * _percentile_95(answers)))
    if lengths[0] > prompt:
        raise ZooError(
            f"The shortest of {len(lengths)} prompts has {lengths[0]} tokens, but the context of {model.name} is "
            f"{context}, of which {response} are for the answer: use shorter prompts."
        )
    usable = max(int(ppo.count * sum(length <= prompt for _, length in by_row) / len(by_row)), 1)
    # Prompts are held out by their text, so all rows of a prompt are held out, or none.
    different = int(ppo.prompts * sum(length <= prompt for length in lengths) / len(lengths))
    if different < MIN_PROMPTS:
        raise ZooError(
            f"{ppo.data.name} has {different} different prompts that are short enough, and some are held out of "
            f"training: give --prompts with at least {MIN_PROMPTS}."
        )
    evaluated = max(2, min(MAX_PROMPTS, different // 8))
    test = ppo.keys["dataset_test_split"]
    # Without a test split half of the held-out prompts are for the evaluation; the others monitor training.
    share = min(0.1 if test else 0.2, max(0.005, math.ceil((750 if test else 1500) * evaluated / different) / 1000))
    rollout = max(2, min(ROLLOUT, 2 ** int(math.log2(max(usable * (1 - 2 * share) / 2, 2)))))
    rows = min(MICRO_BATCH, rollout)
    episodes = max(rollout, min(MAX_EPISODES, int(usable * (1 - 2 * share))) // rollout * rollout)
    updates = episodes // rollout
    text = min(context, MAX_TOKENS, max(16, _round_up(longest)))
    decisions.add("max_length", text, f"95% of texts have at most {longest} tokens")
    decisions.add("max_prompt_length", prompt, f"95% of {len(lengths)} prompts have at most {usual} tokens")
    twice = f"twice {_percentile_95(answers)}, which 95% of answers do not exceed; " if answers else ""
    reason = f"{twice}at most {MAX_RESPONSE}, and what prompts leave of the context"
    decisions.add("response_length", response, reason)
    if test:
        evaluated = min(evaluated, ppo.test_prompts or 0)
    few = "" if evaluated >= FEWEST else f"; TOO FEW FOR A VERDICT, which needs {FEWEST}: give --prompts with more"
    evaluation = f"{evaluated} prompts for the evaluation"
    if test:
        decisions.add("evaluation.dataset_test_split", test, f"{evaluation}{few}")
    reason = "prompts to monitor training" if test else f"{evaluation}, and as many to monitor training{few}"
    decisions.add("held_out_share", share, reason)
    return {
        "prompt": prompt, "response": response, "text": text, "evaluated": evaluated, "share": share,
        "rollout": rollout, "rows": rows, "accumulated": rollout // rows, "episodes": episodes, "updates": updates,
        "save": max(1, updates // 20), "sft_rows": max(1, min(32, readings["sft"].count // 4)),
    }  # fmt: skip


def _percentile_95(lengths: Sequence[int]) -> int:
    """The 95th percentile of sorted lengths."""
    return lengths[int(0.95 * (len(lengths) - 1))]


def _round_up(length: int) -> int:
    """The next multiple of 32, so that a slightly longer row outside the sample is not left out."""
    return -(-length // 32) * 32


def _lengths(
    readings: Mapping[str, StageData], tokenizer: PreTrainedTokenizerBase, conversational: bool
) -> tuple[list[int], list[int]]:
    """Sorted lengths, in tokens, of the texts that SFT and the reward model read, and of answers with a prompt."""
    texts, answers = [], []
    for prompt, text in _texts(readings, conversational):
        texts.append(len(tokenize_for_reward(text, tokenizer, ended=True)))
        if prompt is not None:
            answers.append(max(texts[-1] - len(tokenize_prompt(prompt, tokenizer)), 1))
    return sorted(texts), sorted(answers)


def _texts(readings: Mapping[str, StageData], conversational: bool) -> Iterator[tuple[Any, Any]]:
    """The same texts or conversations with their prompts; None for a text without its own prompt."""
    for row in readings["sft"].rows:
        shaped = {**row, **as_turns(row)} if conversational else row
        prompt = shaped["messages"][:-1] if "messages" in shaped else shaped.get("prompt")
        yield prompt if "messages" in shaped or "completion" in shaped else None, sft_text(shaped, "text")
    for row in readings["reward"].rows if "reward" in readings else ():
        turns = as_turns(row) if conversational else row
        for side in ("chosen", "rejected"):
            yield turns["prompt"], append_completion(turns["prompt"], turns[side])


def _fitting(
    about: dict[str, Any], model: ModelFacts, request: RecipeRequest, decisions: _Decisions
) -> tuple[dict[str, str], Plan]:
    """The files of the recipe and their plan.

    All weights train if that fits. Otherwise an adapter trains, on float32 weights, or on bfloat16 ones if needed.
    """
    device, source = _device(request.gib)
    sizes, longest = about["sizes"], about["sizes"]["prompt"] + about["sizes"]["response"]
    token_bytes = (BFLOAT16 if device.bfloat16 else FLOAT32) * model.kv_values
    limit = int(CACHE_SHARE * device.gib * GIB / token_bytes)
    sizes["cached"] = max(limit, longest) if sizes["rollout"] * longest > limit else None
    if sizes["cached"] is not None:
        reason = f"the KV cache of all answers would take over {CACHE_SHARE:.0%} of the memory"
        decisions.add("max_rollout_batch_tokens", sizes["cached"], reason)
    bits = _has_gpu() and importlib.util.find_spec("bitsandbytes") is not None
    plans: list[Plan] = []
    for lora, bfloat16 in ((False, False), (True, False), (True, True)):
        about |= {"lora": lora, "bfloat16": bfloat16, "eight": lora and bits}
        plan = _plan(about, device)
        plans.append(plan)
        if not plan.changes:
            break
    about["memory"] = {stage.stage: gib(stage.peak) for stage in plan.stages}
    reason = f"training all weights, {_largest_stage(plans[0])} of {device.gib:.0f} GiB {source}"
    decisions.add("use_peft", str(lora).lower(), reason)
    if bfloat16:
        decisions.add("dtype", "bfloat16", f"of the model under LoRA; in float32 {_largest_stage(plans[1])}")
    if about["eight"]:
        decisions.add("optim", "adamw_8bit", "bitsandbytes is installed")
    if lora and model.revision is None:
        reason = (
            f"{model.name} is a folder, and an adapter is only published with a base on a Hub: upload the model and "
            "give its name there, or give a --memory that fits all weights"
        )
        decisions.add("publishing", "not possible yet", reason)
    return _files(about), plan


def _largest_stage(plan: Plan) -> str:
    largest = max(plan.stages, key=lambda stage: stage.peak)
    return f"{largest.stage} takes {gib(largest.peak)} GiB"


def _plan(about: Mapping[str, Any], device: Device) -> Plan:
    import yaml

    files = _files({**about, "memory": {}})
    stages = {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in files.items()}
    recipe = Recipe(about["title"], Path(about["title"]), stages.pop("recipe"), stages)
    return make_plan(recipe, device, suggest_changes=False)


def _files(about: Mapping[str, Any]) -> dict[str, str]:
    names = ["recipe", *(stage for stage in ("sft", "reward", "ppo") if stage in about["readings"])]
    return {f"{name}.yaml": _rendered(name, about) for name in names}


def _device(gib: float | None) -> tuple[Device, str]:
    """The device that the recipe is for, and the reason for that choice."""
    half = not _has_gpu() or has_bfloat16()  # without a GPU, assume one that supports it
    if gib is not None:
        return Device("GPU", gib, bfloat16=half), "given by --memory"
    if _has_gpu():
        return local_device(), "of this machine's GPU"
    return Device("GPU", ASSUMED_GIB), "assumed, as this machine has no GPU; set --memory to change this"


def _has_gpu() -> bool:
    return best_device().type == "cuda"


#: The argument that makes a reward count words.
WORDS = "unit='words'"


def _as_judge(name: str) -> str:
    """Converts a reward's name to the name of a judge, which reads texts, not tokens."""
    if getattr(load_object(name, group=REWARDS), "unit", None) != "tokens":
        return name
    reward, _, arguments = name.removesuffix(")").partition("(")
    return f"{reward}({', '.join(filter(None, (arguments, WORDS)))})"


def _judge(request: RecipeRequest, readings: Mapping[str, StageData], decisions: _Decisions) -> dict[str, Any]:
    """The keys of the evaluation that name the judge."""
    if request.judge is not None:
        if request.judge.startswith("reward:"):
            name = request.judge.removeprefix("reward:")
            check_outputs(name, dict(enumerate(reward_labels(split_label(name)[0]))))
        judge, reason = request.judge, "given by --judge"
    elif verifiable := [name for name in request.functions if isinstance(load_object(name, group=REWARDS), Verifiable)]:
        judge, reason = f"rule:{verifiable[0]}", "a verifiable reward is its own judge"
    elif "reward" in readings:
        judge = SAME_LABELS
        reason = (
            f"no judge was given: a second reward model trains on {JUDGE_SHARE:.0%} of the pairs; another public one, "
            "by --judge reward:NAMESPACE/NAME, would not share the errors of these labels"
        )
    else:
        judge = f"reward:{request.models[0]}" if request.models else f"rule:{_as_judge(request.functions[0])}"
        reason = (
            "NO JUDGE WAS GIVEN: the reward itself shows that training worked, not that answers got better; name "
            "another reward model by --judge reward:NAMESPACE/NAME"
        )
    decisions.add("judge", judge, reason)
    return {"judge": judge}


def _rendered(name: str, about: Mapping[str, Any]) -> str:
    import yaml
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def plain(value: Any) -> str:
        return (
            yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            .removesuffix("...\n")
            .strip()
        )

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["yaml"] = plain
    defaults = {key: entry.default for key, entry in declared_keys(name).items()} if name in STAGES else {}
    return environment.get_template(f"{name}.yaml.jinja").render({**about, "defaults": defaults})
