"""Writes a recipe for a user's model and data, with values chosen from their files."""

import functools
import importlib.util
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ZooError
from ...evaluation.judges.named import check_judges_available, check_outputs
from ...evaluation.judges.panel import split_label
from ...modeling.chat_template import ChatSettings
from ...modeling.devices import best_device, has_bfloat16
from ...modeling.special_tokens import has_own_pad
from ...plugins import REWARDS, did_you_mean, load_object, split_settings
from ...rewards.verifiable import Verifiable
from ...runs.data.columns import has_placeholders, placeholder_columns
from ...runs.recipe import Recipe
from ...runs.registry import STAGES
from ...runs.settings.declared import declared_keys
from ...runs.settings.evaluation import LLMConfig
from ...runs.settings.judge_names import SAME_LABELS
from ..plan.devices import Device, local_device
from ..plan.memory import BFLOAT16, FLOAT32, GIB
from ..plan.plan import make_plan, predict_update
from ..plan.result import Plan, format_gib, format_seconds
from .data import MAX_COUNTED, InspectedData, StageData, inspect_data, make_stage_data
from .model import ModelFacts, inspect_model, reward_labels
from .request import RecipeRequest, check_folder
from .sizes import MAX_EPISODES, Decisions, add_episodes, choose_batches, choose_sizes
from .validation import check_recipe

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
#: Maximum share of a GPU's memory for the KV cache.
CACHE_SHARE = 0.25
#: Rank of LoRA adapters.
LORA_RANK = 16
#: Bounds for a recipe on a CPU: at least these tokens per answer and answers per update, and at most these seconds per
#: update and per run.
CPU_MIN_RESPONSE, CPU_MIN_ROLLOUT, CPU_MAX_UPDATE_SECONDS, CPU_MAX_RUN_SECONDS = 64, 8, 60, 7200
#: Share of the pairs for training the judge `same-labels`.
JUDGE_SHARE = 0.3


@dataclass(frozen=True)
class NewRecipe:
    """A recipe that is not written yet.

    Attributes:
        files: File name -> text.
        decisions: (setting, value, reason), in order.
        plan: The memory and time that the recipe needs.
    """

    files: Mapping[str, str]
    decisions: Sequence[tuple[str, str, str]]
    plan: Plan


def make_recipe(request: RecipeRequest, *, title: str) -> NewRecipe:
    """Inspects the model and the data, and chooses the recipe's settings.

    Args:
        request: The options for the recipe.
        title: The recipe's name.

    Raises:
        ZooError: No recipe fits the request.
    """
    decisions = Decisions()
    request.check()
    functions, reward_model = request.reward_functions, next(iter(request.reward_models), None)
    if request.judge is not None:
        check_judges_available([request.judge], LLMConfig(), hub=None)
    for name in functions:
        load_object(name, group=REWARDS)
    model = inspect_model(request.model)
    data_by_stage = _choose_stage_data(request, can_skip_sft=model.has_chat_template)
    is_chat, chat_settings = _choose_prompt_form(model, data_by_stage, decisions)
    _describe_model(model, decisions, first_stage="SFT" if "sft" in data_by_stage else "PPO")
    for stage, data in data_by_stage.items():
        columns = ", ".join(
            f"{stage_column} from {data_column}" for stage_column, data_column in data.keys["columns"].items()
        )
        split = data.keys["dataset_train_split"]
        location = ":".join(filter(None, (data.data_set.name, data.keys["dataset_config"], split)))
        at_least = "at least " if data.row_count == MAX_COUNTED else ""
        prompt_note = "" if data.prompt_count == data.row_count else f" of {data.prompt_count_text} different prompts"
        reason = f"{at_least}{data.row_count:,} rows{prompt_note}{f', {columns}' if columns else ''}"
        decisions.add(f"data of {stage}", location, reason)
    if is_chat:
        chat_settings.write(model.tokenizer)
    device, device_reason = _choose_device(request.gib)
    sizes = choose_sizes(model, data_by_stage, is_chat, decisions)
    labels = [] if reward_model is None else reward_labels(reward_model)
    label = labels[-1] if len(labels) > 1 else None
    if label is not None:
        decisions.add("reward_label", label, f"GUESSED: the last of {', '.join(labels)}; its output is the reward")
    judge = _choose_judge(request, data_by_stage, decisions)
    variables = {
        "title": title,
        "model": model,
        "data_by_stage": data_by_stage,
        "shared": data_by_stage["reward" if "reward" in data_by_stage else "ppo"].data_set,
        "conversational": is_chat and data_by_stage["ppo"].is_plain_text,
        "chat": chat_settings,
        "functions": functions,
        "reward_model": reward_model,
        "label": label,
        "sizes": sizes,
        "shared_critic": False,
        "lora": False,
        "bfloat16": False,
        "adamw_8bit": False,
        "recompute": False,
        "rank": LORA_RANK,
        "judge": judge,
        "judge_share": JUDGE_SHARE if judge == SAME_LABELS else None,
    }
    files, plan = _fit_to_memory(variables, device, device_reason, decisions)
    return NewRecipe(files, decisions.rows, plan)


def write(recipe: NewRecipe, folder: Path) -> None:
    """Checks the recipe, and writes it.

    Args:
        recipe: The recipe.
        folder: The recipe's folder, which must be missing or empty.

    Raises:
        ZooError: The recipe is not valid, or the folder cannot be written.
    """
    check_folder(folder)
    with tempfile.TemporaryDirectory() as staging:
        staging_folder = Path(staging) / os.path.basename(os.path.abspath(folder))
        staging_folder.mkdir()
        for name, text in recipe.files.items():
            (staging_folder / name).write_text(text, encoding="utf-8")
        check_recipe(staging_folder)
        try:
            shutil.copytree(staging_folder, folder, dirs_exist_ok=True)
        except OSError as error:
            raise ZooError(f"{folder} cannot be written ({error.strerror or error}): choose another folder.") from error


# Decisions


def _choose_stage_data(request: RecipeRequest, *, can_skip_sft: bool) -> dict[str, StageData]:
    """Chooses how each stage reads its data. Raises ZooError if a stage has no data.

    Args:
        request: The options for the recipe.
        can_skip_sft: Whether PPO may start from the model itself if there are no texts for SFT.
    """
    names = filter(None, (request.preferences, request.prompts, request.texts))
    data_by_name = {name: inspect_data(name) for name in dict.fromkeys(names)}
    samples = (rows for data in data_by_name.values() for subset in data.subsets for rows in subset.rows.values())
    columns = {column for rows in samples for row in rows[:1] for column in row}
    for stage_column, data_column in request.columns.items():
        named_columns = placeholder_columns(data_column) if has_placeholders(data_column) else [data_column]
        if not columns.issuperset(named_columns):
            suggestion = did_you_mean(data_column, columns) or f": they have {', '.join(sorted(columns))}."
            raise ZooError(
                f"--columns maps {stage_column} to {data_column!r}, but the data have no such column{suggestion}"
            )
    reward_data = None
    if request.preferences is not None and not request.reward_models:
        preferences = data_by_name[request.preferences]
        reward_data = make_stage_data(preferences, "pairs", request.columns)
        if reward_data is None:
            raise ZooError(
                f"{_describe_columns(preferences)}, but preferences need the columns chosen and rejected: name them by "
                "--columns '{chosen: …, rejected: …, prompt: …}', or pass other --preferences."
            )
    sft_names = [request.texts] if request.texts else [request.preferences, request.prompts]
    candidates = [data_by_name[name] for name in sft_names if name]
    texts_data = (make_stage_data(data, "texts", request.columns) for data in candidates)
    sft_data = next((data for data in texts_data if data is not None), None)
    if sft_data is None and not (can_skip_sft and request.preferences is None and request.texts is None):
        raise ZooError(
            f"{' and '.join(map(_describe_columns, candidates))}, but SFT reads messages, prompt and completion, or "
            "text: pass such data as --texts, or name the columns by --columns."
        )
    name = request.prompts or request.preferences
    assert name is not None  # `RecipeRequest.check` refuses this
    ppo_data = make_stage_data(data_by_name[name], "prompts", request.columns)
    if ppo_data is None:
        raise ZooError(
            f"{_describe_columns(data_by_name[name])}, but PPO reads prompt, messages, or chosen and rejected: pass "
            "other --prompts."
        )
    stages = {"sft": sft_data, "reward": reward_data, "ppo": ppo_data}
    return {stage: data for stage, data in stages.items() if data is not None}


def _describe_columns(data: InspectedData) -> str:
    rows = next((rows for subset in data.subsets for rows in subset.rows.values() if rows), [{}])
    return f"The data set {data.name} has the columns {', '.join(rows[0])}"


def _choose_prompt_form(
    model: ModelFacts, data_by_stage: Mapping[str, StageData], decisions: Decisions
) -> tuple[bool, ChatSettings]:
    """Returns whether prompts are conversations, and the settings for rendering them."""
    chat_stages = [stage for stage, data in data_by_stage.items() if not data.is_plain_text]
    if chat_stages and not model.has_chat_template:
        raise ZooError(
            f"The data of {chat_stages[0]} are conversations, but {model.name} has no chat template: use a model that "
            "has one, or plain texts."
        )
    has_separate_prompts = all(data.has_prompt or not data.is_plain_text for data in data_by_stage.values())
    if not (model.has_chat_template and has_separate_prompts):
        reason = "prompts and answers are one text" if model.has_chat_template else "the tokenizer has no chat template"
        decisions.add("prompts", "plain texts", reason)
        return False, ChatSettings()
    template_reason = "the tokenizer has a chat template, and prompts have their own column"
    reason = "the data are conversations" if chat_stages else template_reason
    decisions.add("prompts", "conversations", f"{reason}; a plain prompt becomes a user turn")
    if not model.has_thinking_switch:
        return True, ChatSettings()
    reason = "the template has this variable, and the answers have no thoughts"
    decisions.add("chat_template_kwargs", "enable_thinking: false", reason)
    return True, ChatSettings(chat_template_kwargs={"enable_thinking": False})


def _describe_model(model: ModelFacts, decisions: Decisions, *, first_stage: str) -> None:
    size = f"{model.parameters / 1e6:,.0f}M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    description = f"{model.architecture}, {size} parameters, {model.dtype}"
    decisions.add("model", description, f"config.json of {model.name}")
    decisions.add("context", model.context_length or "no bound", "tokens, by its configuration")
    tokenizer = model.tokenizer
    reason = "PAD: the tokenizer's own"
    if not has_own_pad(tokenizer):
        pad_token = model.spare_pad_token if first_stage == "PPO" and model.spare_pad_token else "another"
        reason = f"PAD: {first_stage} uses {pad_token}, because PAD must differ from EOS"
    decisions.add("special tokens", f"EOS {tokenizer.eos_token}, PAD {tokenizer.pad_token}", reason)


def _fit_to_memory(
    variables: dict[str, Any], device: Device, device_reason: str, decisions: Decisions
) -> tuple[dict[str, str], Plan]:
    """Returns the recipe's files and its plan.

    All weights train if that fits into memory. Otherwise an adapter trains, on float32 weights if they fit, or on
    bfloat16 weights.
    """
    if device.cpu:
        _shorten_for_cpu(variables, device, decisions)
    model: ModelFacts = variables["model"]
    sizes = variables["sizes"]
    max_length = sizes["prompt_length"] + sizes["response_length"]
    token_bytes = (BFLOAT16 if device.bfloat16 else FLOAT32) * model.kv_values
    cache_tokens = int(CACHE_SHARE * device.gib * GIB / token_bytes)
    sizes["cache_tokens"] = max(cache_tokens, max_length) if sizes["rollout"] * max_length > cache_tokens else None
    if sizes["cache_tokens"] is not None:
        reason = f"the KV cache of all answers would take over {CACHE_SHARE:.0%} of the memory"
        decisions.add("max_rollout_batch_tokens", sizes["cache_tokens"], reason)
    plan, largest_stages = _choose_weights(variables, device)
    lora, bfloat16 = variables["lora"], variables["bfloat16"]
    variables["memory"] = {stage.stage: format_gib(stage.peak) for stage in plan.stages}
    memory_text = f"{device.usable_gib:.1f} GiB usable; {device.gib:.0f} GiB {device_reason}"
    reason = f"training all weights, {largest_stages[0]} of {memory_text}"
    decisions.add("use_peft", str(lora).lower(), reason)
    if bfloat16:
        decisions.add("dtype", "bfloat16", f"of the model under LoRA; in float32 {largest_stages[1]}")
    if variables["adamw_8bit"]:
        decisions.add("optim", "adamw_8bit", "bitsandbytes is installed")
    if lora and model.revision is None:
        location = shlex.quote(model.name)
        reason = (
            f"{model.name} is on this machine, and an adapter is only published with a base on a Hub: put the base on "
            f"the embedded Hub by `rlhf-zoo hub add {location} NAMESPACE/NAME` and pass that name to `new` with "
            "--source_hub local, or pass the model's id on the Hub; the recipe trains without either"
        )
        decisions.add("publishing", "not possible yet", reason)
    return _render_files(variables), plan


def _choose_weights(variables: dict[str, Any], device: Device) -> tuple[Plan, list[str]]:
    """Chooses which weights train, and whether activations are recomputed. Sets both choices in `variables`.

    PPO, which holds the most models, is planned first: if it does not fit, the other stages need no plan.

    Returns:
        The plan; and for each kind of training that was tried, the name and memory of the largest stage.
    """
    has_bitsandbytes = _has_gpu() and importlib.util.find_spec("bitsandbytes") is not None
    kinds = ((False, False), (True, False), (True, True))  # (LoRA, its frozen weights in bfloat16)
    largest_stages = []
    for lora, bfloat16 in kinds:
        variables |= {"lora": lora, "bfloat16": bfloat16, "adamw_8bit": lora and has_bitsandbytes}
        for recompute in (False, True):
            variables["recompute"] = recompute
            plan = _plan_recipe(variables, device, stages=["ppo"])
            is_last = recompute and (lora, bfloat16) == kinds[-1]
            if is_last or not plan.changes:
                plan = _plan_recipe(variables, device)
            if not plan.changes:
                break
        largest_stages.append(_describe_largest_stage(plan))
        if not plan.changes:
            break
    return plan, largest_stages


def _shorten_for_cpu(variables: dict[str, Any], device: Device, decisions: Decisions) -> None:
    """Shortens updates and the run for a CPU until they keep their time limits, or are as short as the bounds allow.

    All weights are assumed to train.
    """
    sizes = variables["sizes"]
    sizes["cache_tokens"] = None
    limit = f"an update should take at most {CPU_MAX_UPDATE_SECONDS} s on this CPU"

    def predict_seconds() -> float | None:
        duration = predict_update(_build_recipe(variables), device)
        return None if duration is None else duration.total

    while (update_seconds := predict_seconds()) is not None and update_seconds > CPU_MAX_UPDATE_SECONDS:
        if not variables["shared_critic"]:
            variables["shared_critic"] = True
            decisions.add("critic", "shared", f"a head on the policy is faster than a separate model: {limit}")
        elif sizes["response_length"] > CPU_MIN_RESPONSE:
            sizes["response_length"] = max(CPU_MIN_RESPONSE, sizes["response_length"] // 2)
            decisions.add("response_length", sizes["response_length"], limit)
        elif sizes["rollout"] > CPU_MIN_ROLLOUT:
            sizes |= choose_batches(sizes["trained_rows"], sizes["rollout"] // 2, MAX_EPISODES)
            decisions.add("answers per update", sizes["rollout"], limit)
        else:
            break
    # Without measured rates for this CPU, the run's length is not limited.
    if update_seconds is None or update_seconds * sizes["updates"] <= CPU_MAX_RUN_SECONDS:
        add_episodes(sizes, decisions)
        return
    max_updates = max(1, int(CPU_MAX_RUN_SECONDS / update_seconds))
    sizes |= choose_batches(sizes["trained_rows"], sizes["rollout"], max_updates * sizes["rollout"])
    duration = format_seconds(update_seconds)
    reason = f"an update takes about {duration} s on this CPU; the run should end within two hours"
    add_episodes(sizes, decisions, reason)


def _describe_largest_stage(plan: Plan) -> str:
    largest = max(plan.stages, key=lambda stage: stage.peak)
    return f"{largest.stage} takes {format_gib(largest.peak)} GiB"


def _plan_recipe(variables: Mapping[str, Any], device: Device, *, stages: Sequence[str] | None = None) -> Plan:
    return make_plan(_build_recipe(variables), device, stages=stages, suggest_changes=False)


def _build_recipe(variables: Mapping[str, Any]) -> Recipe:
    import yaml

    files = _render_files({**variables, "memory": {}})
    keys = {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in files.items()}
    return Recipe(variables["title"], Path(variables["title"]), keys.pop("recipe"), keys)


def _render_files(variables: Mapping[str, Any]) -> dict[str, str]:
    names = ["recipe", *(stage for stage in ("sft", "reward", "ppo") if stage in variables["data_by_stage"])]
    return {f"{name}.yaml": _render(name, variables) for name in names}


def _choose_device(gib: float | None) -> tuple[Device, str]:
    """Returns the device for which the recipe is written, and the reason for this choice."""
    # Without a GPU here, --memory describes another machine's GPU, which is assumed to support bfloat16.
    bfloat16 = not _has_gpu() or has_bfloat16()
    if gib is not None:
        return Device("GPU", gib, bfloat16=bfloat16), "set by --memory"
    if _has_gpu():
        return local_device(), "of this machine's GPU"
    return local_device(), "of this machine, which has no GPU; set --memory for a recipe that runs on one"


def _has_gpu() -> bool:
    return best_device().type == "cuda"


def _judge_name(name: str) -> str:
    """Converts a reward's name to a judge's name. A judge reads only texts, so it counts words instead of tokens."""
    if getattr(load_object(name, group=REWARDS), "unit", None) != "tokens":
        return name
    bare_name, settings = split_settings(name)
    arguments = ", ".join(f"{key}={value!r}" for key, value in {**(settings or {}), "unit": "words"}.items())
    return f"{bare_name}({arguments})"


def _choose_judge(request: RecipeRequest, data_by_stage: Mapping[str, StageData], decisions: Decisions) -> str:
    """Returns the name of the evaluation's judge."""
    functions = request.reward_functions
    verifiable_functions = [name for name in functions if isinstance(load_object(name, group=REWARDS), Verifiable)]
    if request.judge is not None:
        if request.judge.startswith("reward:"):
            name = request.judge.removeprefix("reward:")
            check_outputs(name, dict(enumerate(reward_labels(split_label(name)[0]))))
        judge, reason = request.judge, "named by --judge"
    elif verifiable_functions:
        judge, reason = f"rule:{verifiable_functions[0]}", "a verifiable reward is its own judge"
    elif "reward" in data_by_stage:
        judge = SAME_LABELS
        reason = (
            f"no judge was given: a second reward model trains on {JUDGE_SHARE:.0%} of the pairs; another public one, "
            "by --judge reward:NAMESPACE/NAME, would not share the errors of these labels"
        )
    else:
        models = request.reward_models
        judge = f"reward:{models[0]}" if models else f"rule:{_judge_name(functions[0])}"
        reason = (
            "NO JUDGE WAS GIVEN: the reward itself shows that training worked, not that answers got better; name "
            "another reward model by --judge reward:NAMESPACE/NAME"
        )
    decisions.add("judge", judge, reason)
    return judge


def _render(name: str, variables: Mapping[str, Any]) -> str:
    defaults = {key: entry.default for key, entry in declared_keys(name).items()} if name in STAGES else {}
    return str(_environment().get_template(f"{name}.yaml.jinja").render({**variables, "defaults": defaults}))


@functools.cache
def _environment() -> "Environment":
    """Returns the Jinja environment. It is cached, so that each template is compiled only once."""
    import yaml
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def as_yaml(value: Any) -> str:
        text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        return text.removesuffix("...\n").strip()  # yaml ends a plain scalar with "..."

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters["yaml"] = as_yaml
    return environment
