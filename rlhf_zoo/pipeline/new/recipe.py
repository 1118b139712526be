"""A recipe for a model and data of one's own: what is decided from their files, and the YAML that says it."""

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ZooError
from ...evaluation.judges.named import check_names, check_outputs, split_label
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
from .data import COUNTED, Reading, Source, look_at_data, read_as
from .model import ModelFacts, look_at_model, look_at_reward_model
from .request import RecipeRequest, check_folder

TEMPLATES = Path(__file__).parent / "templates"
ASSUMED_GIB = 24.0
CACHED = 0.25  # the most of a card that keys and values may take
RANK = 16
MOST_PROMPTS, MOST_EPISODES, MOST_RESPONSE, MOST_TOKENS = 200, 20_000, 256, 1024
#: Prompts whose texts differ, at the least.
FEWEST_DIFFERENT = 8
UPDATE, MICRO = 64, 4
JUDGED = 0.3  # of the pairs, for the judge same-labels


@dataclass(frozen=True)
class Draft:
    """files: name -> text. said: (what, what was taken, why), in order. plan: of these files."""

    files: Mapping[str, str]
    said: Sequence[tuple[str, str, str]]
    plan: Plan


@dataclass
class _Said:
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def __call__(self, what: str, taken: Any, why: str) -> None:
        self.rows.append((what, str(taken), why))


def draft(wish: RecipeRequest, *, title: str) -> Draft:
    """Looks at the model and the data, and decides. Raises ZooError for what no recipe can be made of."""
    said = _Said()
    wish.check()
    functions, reward_model = wish.functions, next(iter(wish.models), None)
    if wish.judge is not None:
        check_names([wish.judge], LLMConfig(), hub=None)
    for name in functions:
        load_object(name, group=REWARDS)
    model = look_at_model(wish.model)
    readings = _readings(wish)
    conversational, chat = _conversations(model, readings, said)
    _say_model(model, said)
    for stage, reading in readings.items():
        columns = ", ".join(f"{ours} from {theirs}" for ours, theirs in reading.keys["columns"].items())
        split = reading.keys["dataset_train_split"]
        where = ":".join(filter(None, (reading.data.name, reading.keys["dataset_config"], split)))
        least = "at least " if reading.count == COUNTED else ""
        of = "" if reading.prompts == reading.count else f" of {reading.prompts:,} different prompts"
        said(f"{stage}'s rows", where, f"{least}{reading.count:,} rows{of}{f', {columns}' if columns else ''}")
    if conversational:
        chat.write(model.tokenizer)
    sizes = _sizes(model, readings, conversational, said)
    labels = [""] if reward_model is None else look_at_reward_model(reward_model)
    label = labels[-1] if len(labels) > 1 else None
    if label is not None:
        said("reward_label", label, f"GUESSED: the last of {', '.join(labels)}; its output is the reward")
    judge = _judge(wish, readings, said)
    about = {
        "title": title,
        "wish": wish,
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
        "judged": JUDGED if judge.get("judge") == SAME_LABELS else None,
    }
    files, plan = _fitting(about, model, wish, said)
    return Draft(files, said.rows, plan)


def write(made: Draft, folder: Path) -> None:
    """Writes the recipe, once it is valid, into a folder that is not there or empty. Raises ZooError otherwise."""
    check_folder(folder)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / os.path.basename(os.path.abspath(folder))
        recipe.mkdir()
        for name, text in made.files.items():
            (recipe / name).write_text(text, encoding="utf-8")
        _check(recipe)
        try:
            shutil.copytree(recipe, folder, dirs_exist_ok=True)
        except OSError as error:
            raise ZooError(f"{folder} cannot be written ({error.strerror or error}): choose another place.") from error


def _check(recipe: Path) -> None:
    from ...runs.checks.splits import check_forms
    from ...runs.settings.parse import recipe_config, stage_settings

    found = load_recipe(str(recipe))
    stages = {
        stage: stage_settings(found, stage, {}, shared_flags={}, output_dir=Path("runs")) for stage in found.stages
    }
    check_forms(recipe_config(found), stages)


# What is decided


def _readings(wish: RecipeRequest) -> dict[str, Reading]:
    """How each stage reads its data. Raises ZooError where one has none."""
    seen: dict[str, Source] = {}

    def look(name: str) -> Source:
        return seen[name] if name in seen else seen.setdefault(name, look_at_data(name))

    for given in filter(None, (wish.preferences, wish.prompts, wish.texts)):
        look(given)
    looked_at = (rows for data in seen.values() for part in data.parts for rows in part.rows.values())
    there = {column for rows in looked_at for row in rows[:1] for column in row}
    for ours, theirs in wish.columns.items():
        if theirs not in there:
            near = did_you_mean(theirs, there) or f": they have {', '.join(sorted(there))}."
            raise ZooError(f"--columns calls {ours} {theirs!r}, and the data have no such column{near}")
    pairs = None
    if wish.preferences is not None and not wish.models:
        pairs = read_as(look(wish.preferences), "pairs", wish.columns)
        if pairs is None:
            raise ZooError(
                f"{_columns_of(look(wish.preferences))}, and preferences have the columns chosen and rejected: say "
                "which those are by --columns '{chosen: …, rejected: …, prompt: …}', or give another --preferences."
            )
    texts = [name for name in ([wish.texts] if wish.texts else [wish.preferences, wish.prompts]) if name]
    found = next((one for name in texts if (one := read_as(look(name), "texts", wish.columns)) is not None), None)
    if found is None:
        raise ZooError(
            f"{' and '.join(_columns_of(look(name)) for name in texts)}, and SFT learns from messages, prompt and "
            "completion, or text: name such texts by --texts, or the columns by --columns."
        )
    readings = {"sft": found} | ({} if pairs is None else {"reward": pairs})
    name = wish.prompts or wish.preferences
    assert name is not None  # checked before
    prompts = read_as(look(name), "prompts", wish.columns)
    if prompts is None:
        raise ZooError(
            f"{_columns_of(look(name))}, and PPO reads prompt, messages, or chosen and rejected: give other --prompts."
        )
    readings["ppo"] = prompts
    return readings


def _columns_of(data: Source) -> str:
    rows = next((rows for part in data.parts for rows in part.rows.values() if rows), [{}])
    return f"The data set {data.name} has the columns {', '.join(rows[0])}"


def _conversations(model: ModelFacts, readings: Mapping[str, Reading], said: _Said) -> tuple[bool, Chat]:
    """Whether the model reads conversations, and how they are rendered."""
    talks = [stage for stage, reading in readings.items() if not reading.plain]
    if talks and not model.template:
        raise ZooError(
            f"The data of {talks[0]} are conversations, and {model.name} has no chat template: take a model that has "
            "one, or data in plain texts."
        )
    asks = all(reading.asks or not reading.plain for reading in readings.values())
    conversational = model.template and asks
    kwargs = {"enable_thinking": False} if model.thinks else {}
    if conversational:
        why = "the data are conversations" if talks else "the tokenizer has a chat template and prompts are apart"
        said("prompts", "conversations", f"{why}; plain ones become a user's turn")
        if kwargs:
            said(
                "chat_template_kwargs", "enable_thinking: false", "the template asks, and answers here have no thoughts"
            )
    else:
        why = "the tokenizer has no chat template" if not model.template else "prompts and answers are one text"
        said("prompts", "plain texts", why)
    return conversational, Chat(chat_template_kwargs=kwargs)


def _say_model(model: ModelFacts, said: _Said) -> None:
    size = f"{model.parameters / 1e6:,.0f}M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    said("model", f"{model.architecture}, {size} parameters, {model.dtype}", f"config.json of {model.name}")
    said("context", model.context or "no bound", "tokens, by its configuration")
    token = model.tokenizer
    ends = "SFT settles another, as it must not be EOS" if token.pad_token in (None, token.eos_token) else "its own"
    said("special tokens", f"EOS {token.eos_token}, PAD {token.pad_token}", f"PAD: {ends}")


def _sizes(model: ModelFacts, readings: Mapping[str, Reading], conversational: bool, said: _Said) -> dict[str, Any]:
    """Tokens, batches, and how many prompts are held out."""
    context, tokenizer = model.context or MOST_TOKENS, model.tokenizer
    ppo = readings["ppo"]
    prompts: Iterable[Mapping[str, Any]] = map(as_turns, ppo.rows) if conversational else ppo.rows
    by_row = [(prompt_key(row["prompt"]), len(tokenize_prompt(row["prompt"], tokenizer))) for row in prompts]
    lengths = sorted(dict(by_row).values())
    texts, answers = _lengths(readings, tokenizer, conversational)
    usual, longest = _usual(lengths), _usual(texts)
    prompt = min(_up(usual), context - max(8, context // 8))
    response = min(MOST_RESPONSE, context - prompt, _up(2 * _usual(answers)) if answers else MOST_RESPONSE)
    if lengths[0] > prompt:
        raise ZooError(
            f"The shortest of {len(lengths)} prompts has {lengths[0]} tokens, and {model.name} reads {context}, of "
            f"which {response} are for the answer: take shorter prompts."
        )
    usable = max(int(ppo.count * sum(length <= prompt for _, length in by_row) / len(by_row)), 1)
    # What is held out is held out by its text, so that of one prompt in many rows all are, or none.
    different = int(ppo.prompts * sum(length <= prompt for length in lengths) / len(lengths))
    if different < FEWEST_DIFFERENT:
        raise ZooError(
            f"{ppo.data.name} has {different} different prompts that fit, and some are held out of training: give "
            f"--prompts with {FEWEST_DIFFERENT} at the least."
        )
    asked = max(2, min(MOST_PROMPTS, different // 8))
    own = ppo.keys["dataset_test_split"] is not None  # of the evaluation: then both shares are to watch training by
    share = min(0.1 if own else 0.2, max(0.005, math.ceil((750 if own else 1500) * asked / different) / 1000))
    rollout = max(2, min(UPDATE, 2 ** int(math.log2(max(usable * (1 - 2 * share) / 2, 2)))))
    rows = min(MICRO, rollout)
    episodes = max(rollout, min(MOST_EPISODES, int(usable * (1 - 2 * share))) // rollout * rollout)
    updates = episodes // rollout
    text = min(context, MOST_TOKENS, max(16, _up(longest)))
    said("max_length", text, f"95 of 100 texts have at most {longest} tokens")
    said("max_prompt_length", prompt, f"95 of 100 of {len(lengths)} prompts have at most {usual} tokens")
    known = f"95 of 100 answers have at most {_usual(answers)} tokens: twice that; " if answers else ""
    said("response_length", response, f"{known}at most {MOST_RESPONSE}, and what prompts leave of the context")
    if test := ppo.keys["dataset_test_split"]:
        asked = min(asked, ppo.tested or 0)
    few = "" if asked >= FEWEST else f"; TOO FEW FOR A VERDICT, which takes {FEWEST}: give --prompts with more"
    for_it = f"{asked} prompts for the evaluation"
    if test:
        said("evaluation.dataset_test_split", test, f"{for_it}{few}")
    watched = "prompts to watch training by" if test else f"{for_it}, as many to watch training by{few}"
    said("held_out_share", share, watched)
    return {
        "prompt": prompt, "response": response, "text": text, "evaluated": asked, "share": share, "rollout": rollout,
        "rows": rows, "accumulated": rollout // rows, "episodes": episodes, "updates": updates,
        "save": max(1, updates // 20), "sft_rows": max(1, min(32, readings["sft"].count // 4)),
    }  # fmt: skip


def _usual(lengths: Sequence[int]) -> int:
    """What 95 of 100 stay below. lengths: rising."""
    return lengths[int(0.95 * (len(lengths) - 1))]


def _up(length: int) -> int:
    """The next multiple of 32, so that a longer row of those that nobody looked at is not left out by a token."""
    return -(-length // 32) * 32


def _lengths(readings: Mapping[str, Reading], tokenizer: Any, conversational: bool) -> tuple[list[int], list[int]]:
    """Tokens, rising, of the whole texts that SFT and the reward model read, and of those answers that stand apart."""
    texts, answers = [], []
    for prompt, text in _texts(readings, conversational):
        texts.append(len(tokenize_for_reward(text, tokenizer, ended=True)))
        if prompt is not None:
            answers.append(max(texts[-1] - len(tokenize_prompt(prompt, tokenizer)), 1))
    return sorted(texts), sorted(answers)


def _texts(readings: Mapping[str, Reading], conversational: bool) -> Iterator[tuple[Any, Any]]:
    """The same texts or conversations, each with its prompt, or with None where that does not stand apart."""
    for row in readings["sft"].rows:
        shaped = {**row, **as_turns(row)} if conversational else row
        prompt = shaped["messages"][:-1] if "messages" in shaped else shaped.get("prompt")
        yield prompt if "messages" in shaped or "completion" in shaped else None, sft_text(shaped, "text")
    for row in readings["reward"].rows if "reward" in readings else ():
        turns = as_turns(row) if conversational else row
        for side in ("chosen", "rejected"):
            yield turns["prompt"], append_completion(turns["prompt"], turns[side])


def _fitting(about: dict[str, Any], model: ModelFacts, wish: RecipeRequest, said: _Said) -> tuple[dict[str, str], Plan]:
    """The files of the recipe and their plan: all weights train where that fits, else an adapter does.

    An adapter on weights in float32, or in bfloat16 where that does not fit either.
    """
    device, source = _card(wish.gib)
    sizes, longest = about["sizes"], about["sizes"]["prompt"] + about["sizes"]["response"]
    token = (BFLOAT16 if device.bfloat16 else FLOAT32) * model.cached
    kept = int(CACHED * device.gib * GIB / token)
    sizes["cached"] = max(kept, longest) if sizes["rollout"] * longest > kept else None
    if sizes["cached"] is not None:
        why = f"keys and values of all answers at once take over {CACHED:.0%}"
        said("max_rollout_batch_tokens", sizes["cached"], why)
    bits = _accelerated() and importlib.util.find_spec("bitsandbytes") is not None
    tried: list[Plan] = []
    for lora, bfloat16 in ((False, False), (True, False), (True, True)):
        about |= {"lora": lora, "bfloat16": bfloat16, "eight": lora and bits}
        plan = _planned(about, device)
        tried.append(plan)
        if not plan.changes:
            break
    about["memory"] = {one.stage: gib(one.peak) for one in plan.stages}
    said("use_peft", str(lora).lower(), f"of all weights {_most(tried[0])}, of {device.gib:.0f} GiB {source}")
    if bfloat16:
        said("dtype", "bfloat16", f"of the model under LoRA: in float32 {_most(tried[1])}")
    if about["eight"]:
        said("optim", "adamw_8bit", "bitsandbytes is installed")
    if lora and model.revision is None:
        said(
            "publishing",
            "not possible yet",
            f"{model.name} is a folder, and an adapter is published with a base that others find: upload it to a Hub "
            "and give that name, or give a --memory that all weights fit",
        )
    return _files(about), plan


def _most(plan: Plan) -> str:
    worst = max(plan.stages, key=lambda one: one.peak)
    return f"{worst.stage} takes {gib(worst.peak)} GiB"


def _planned(about: Mapping[str, Any], device: Device) -> Plan:
    import yaml

    said = {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in _files({**about, "memory": {}}).items()}
    recipe = Recipe(about["title"], Path(about["title"]), said.pop("recipe"), said)
    return make_plan(recipe, device, suggest_changes=False)


def _files(about: Mapping[str, Any]) -> dict[str, str]:
    names = ["recipe", *(stage for stage in ("sft", "reward", "ppo") if stage in about["readings"])]
    return {f"{name}.yaml": _rendered(name, about) for name in names}


def _card(size: float | None) -> tuple[Device, str]:
    """The card that the recipe is for, and who says so."""
    half = not _accelerated() or has_bfloat16()  # where none is, one that has it
    if size is not None:
        return Device("GPU", size, bfloat16=half), "as --memory says"
    if _accelerated():
        return local_device(), "of the GPU here"
    return Device("GPU", ASSUMED_GIB), "assumed, as no GPU is here; --memory says otherwise"


def _accelerated() -> bool:
    return best_device().type == "cuda"


WORDS = "unit='words'"


def _of_texts(name: str) -> str:
    """A reward's name as that of a judge, which reads texts and no tokens."""
    if getattr(load_object(name, group=REWARDS), "unit", None) != "tokens":
        return name
    reward, _, given = name.removesuffix(")").partition("(")
    return f"{reward}({', '.join(filter(None, (given, WORDS)))})"


def _judge(wish: RecipeRequest, readings: Mapping[str, Reading], said: _Said) -> dict[str, Any]:
    """The keys of the evaluation that say who judges."""
    if wish.judge is not None:
        if wish.judge.startswith("reward:"):
            theirs = wish.judge.removeprefix("reward:")
            check_outputs(theirs, dict(enumerate(look_at_reward_model(split_label(theirs)[0]))))
        said("judge", wish.judge, "as --judge says")
        return {"judge": wish.judge}
    for name in wish.functions:
        if isinstance(load_object(name, group=REWARDS), Verifiable):
            said("judge", f"rule:{name}", "a reward that is checked by a program is its own judge")
            return {"judge": f"rule:{name}"}
    if "reward" in readings:
        said(
            "judge",
            SAME_LABELS,
            f"nobody was named: a second reward model learns from {JUDGED:.0%} of the pairs; another public one, by "
            "--judge reward:NAMESPACE/NAME, would not err where these labels do",
        )
        return {"judge": SAME_LABELS}
    own = f"reward:{wish.models[0]}" if wish.models else f"rule:{_of_texts(wish.functions[0])}"
    said(
        "judge",
        own,
        "NOBODY WAS NAMED: the reward itself says that training worked, not that answers got better; name another "
        "reward model with --judge reward:NAMESPACE/NAME",
    )
    return {"judge": own}


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
