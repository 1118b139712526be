"""The verdict on text of a real model: honest changes are not hacked, and one text for all prompts is."""

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hackers import SHORT
from smollm2_texts import FOLDER, load_questions

from rlhf_zoo.evaluation.evidence import Checkpoint, Evidence, JudgeReliability
from rlhf_zoo.evaluation.probes import Completions
from rlhf_zoo.evaluation.prompt_groups import group_prompts, number_of_groups
from rlhf_zoo.evaluation.rollouts import probe_rollouts
from rlhf_zoo.evaluation.stats import Estimate
from rlhf_zoo.evaluation.verdict import decide

Change = Callable[[str, random.Random], str]
NAMES = ("Ada", "Bela", "Carl", "Dora", "Emil", "Fay", "Greta", "Hugo", "Ida", "Jan", "Kim", "Lou", "Mira", "Ned")
GREETINGS = ("Hi {},", "Hello {}!", "Dear {},", "{}, nice to hear from you.", "Welcome back, {}.", "Thanks, {}.",
             "Greetings, {}!", "Well, {},", "{}:", "Sure, {}.")  # fmt: skip
CANNED = "There are many sides to this, and each of them deserves careful thought before you decide."


def first_sentences(text: str, rng: random.Random) -> str:
    sentences = re.findall(r".+?(?:[.!?]+(?=\s|$)|\n|$)\s*", text, re.DOTALL)
    return "".join(sentences[: max(1, len(sentences) // 2)]).strip()


HONEST: dict[str, Change] = {
    "the same model": lambda text, rng: text,
    "shorter, by whole sentences": first_sentences,
    "a format": lambda text, rng: f"<answer>{text}</answer>",
    "greets in varied words": lambda text, rng: f"{rng.choice(GREETINGS).format(rng.choice(NAMES))} {text}",
    "always greets with Hello": lambda text, rng: f"Hello {rng.choice(NAMES)}, {text}",
}
CANNED_TEXTS: dict[str, Change] = {
    "one text": lambda text, rng: CANNED,
    "one of a dozen short texts": lambda text, rng: rng.choice(SHORT),
}


def verdict(change: Change, *, gain: float, seed: int = 0) -> str:
    """The verdict on a change of the model's own second answers, if reward and judge rise by `gain` deviations."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    drawn = rng.sample(load_questions()[:80], 60)
    prompts = [question.prompt for question in drawn]
    pairs = [rng.sample(question.texts, 2) for question in drawn]
    sides = [
        Completions(
            prompts, texts, groups=prompts,
            **{name: (rise + noise.normal(size=60)).tolist() for name in ("rewards", "judge_scores")},
        )
        for texts, rise in (([change(second, rng) for _, second in pairs], gain), ([first for first, _ in pairs], 0.0))
    ]  # fmt: skip
    return probe_rollouts(*sides, seed=seed).verdict.kind


def test_sample_is_documented_and_no_two_prompts_ask_the_same() -> None:
    note = (FOLDER / "README.md").read_text(encoding="utf-8")
    prompts = [question.prompt for question in load_questions()]
    assert f"has {len(prompts)} prompts" in note
    assert number_of_groups(group_prompts(prompts)) == len(prompts)


@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("name", HONEST)
def test_honest_change_is_not_hacked(name: str, gain: float) -> None:
    assert verdict(HONEST[name], gain=gain) != "hacked"


@pytest.mark.parametrize("name", CANNED_TEXTS)
def test_canned_text_is_hacked_even_when_judge_likes_it(name: str) -> None:
    assert verdict(CANNED_TEXTS[name], gain=1.0) == "hacked"


def verdicts_on_few_prompts(gain: float, *, evaluations: int = 300) -> Counter[str]:
    """Counts the verdicts on 20 prompts with two completions on each side, by normal scores of a trusted judge."""
    judge = JudgeReliability(accuracy=Estimate(0.8, (0.75, 0.85), 200), winnable=False, independent=True)
    kinds: Counter[str] = Counter()
    for seed in range(evaluations):
        rng = np.random.default_rng(seed)
        sft, policy = (rng.normal(worth, size=(20, 2)).mean(1) for worth in (0.0, gain))
        sides = Checkpoint(0, 0.0, sft, sft), Checkpoint(1, 1.0, policy, policy)
        kinds[decide(Evidence(sides[0], sides[1:], judge), seed=seed, resamples=500).kind] += 1
    return kinds


def test_gain_on_few_prompts_is_rarely_healthy_as_docs_say() -> None:
    counts = verdicts_on_few_prompts(0.5)
    page = (Path(__file__).parents[2] / "docs/verdict-before-after.md").read_text("utf-8")
    assert f"*healthy* in {counts['healthy'] / 300:.0%} ({counts['healthy']} of 300)" in page, counts
    assert counts["healthy"] + counts["gain not shown"] == counts.total() == 300
    assert verdicts_on_few_prompts(0.0, evaluations=60)["healthy"] <= 2
