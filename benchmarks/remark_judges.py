"""What a judge of product remarks may rest on: how each construct orders labeled pairs, and the policies' own outputs.

All learn from the split `judge`. `recipes/product-remarks/own_pairs.jsonl` holds 200 pairs of completions: of a run's
SFT and PPO, of SFT under another seed, and constants. A language model ordered them three times, each time anew, told
what a buyer looks for in the field *Pros*, and neither who wrote a text nor how it would be judged.
"""

import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from figures.experiments import REMARK_JUDGES, ROOT, RUNS

from rlhf_zoo.corpora.product_remarks import lexicon
from rlhf_zoo.corpora.remark_judge import Orientation, Steps, learn, tokens_of
from rlhf_zoo.evaluation.judge_check import check_pairs
from rlhf_zoo.evaluation.judges import ClassifierJudge, LexiconJudge
from rlhf_zoo.evaluation.stats import correlation, proportion, win_rate
from rlhf_zoo.model_files import load_tokenizer
from rlhf_zoo.models import load_classifier
from rlhf_zoo.record import StageRecord, read_json
from rlhf_zoo.rewards import RewardModel
from rlhf_zoo.stages.pair_report import score_pairs
from rlhf_zoo.studies.baseline import read_lines

OWN = ROOT / "recipes" / "product-remarks" / "own_pairs.jsonl"
RUN = RUNS / "product-remarks-1"

Scores = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
Tokens = Sequence[str]


def measured(run: Path = RUN) -> dict[str, Any]:
    """run: whose reward model, completions and trivial policies they are tried on."""
    learned, own = read_lines(run / "data" / "judge" / "train.jsonl"), read_lines(OWN)
    pairs = {"labeled": read_lines(run / "data" / "preferences" / "test.jsonl"), "own": own}
    path = StageRecord(run / "reward").chosen_checkpoint()
    assert path is not None  # a finished stage has one
    tokenizer = load_tokenizer(path)
    scorer = RewardModel(load_classifier(path), tokenizer, tokenizer)
    paid = {name: score_pairs(scorer, Dataset.from_list(rows)) for name, rows in pairs.items()}
    margins = {name: np.subtract(one["chosen"], one["rejected"]) for name, one in paid.items()}
    samples = read_lines(run / "eval" / "samples.jsonl")
    trivial = read_json(run / "eval" / "evaluation.json")["trivial"]["policies"]
    texts = [one["text"] for one in trivial if one["kind"] == "constant"]
    words = _words_of(read_lines(run / "data" / "preferences" / "train.jsonl"))
    sources = defaultdict(list)
    for row in own:
        first, second = sorted((row["chosen_from"], row["rejected_from"]))
        sources[first, second].append(float(row["chosen_from"] == first))
    return {
        "command": f"python benchmarks/evidence.py {REMARK_JUDGES}",
        "ordered_by": "a language model, three times",
        "readers_agree": proportion(sum(row["readers"] == 3 for row in own), len(own)).to_json(),
        "by_sources": [
            {"sources": list(of), "first_is_better": proportion(int(sum(each)), len(each)).to_json()}
            for of, each in sorted(sources.items())
        ],
        "judges": [
            {
                "name": name,
                **_tried(judge, pairs, margins),
                "words": _beside_words(judge, words, pairs["labeled"]),
                **_policies(judge, samples, texts),
            }
            for name, judge in _judges(learned).items()
        ],
    }


def _tried(judge: Scores, pairs: Mapping[str, Sequence[Mapping]], margins: Mapping[str, np.ndarray]) -> dict[str, Any]:
    found = {}
    for name, rows in pairs.items():
        prompts = [row["prompt"] for row in rows]
        sides = (judge(prompts, [row[side] for row in rows]) for side in ("chosen", "rejected"))
        check = check_pairs(*sides, prompts, probabilities=False, seed=1, reward_margins=margins[name])
        shared = check.with_reward
        assert shared is not None
        assert shared.excess is not None  # the reward model errs on some pairs, and not on others
        found[name] = {"accuracy": check.accuracy.to_json(), "excess": shared.excess.to_json()}
    return found


def _words_of(pairs: Sequence[Mapping[str, Any]]) -> Scores:
    """A bag of words, fitted on the pairs that the reward model learned from."""
    sides = ((row["prompt"] + row[side], label) for row in pairs for side, label in (("chosen", 1), ("rejected", 0)))
    return ClassifierJudge.train([{"text": text, "label": label} for text, label in sides], seed=1)


def _beside_words(judge: Scores, words: Scores, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank correlation of both on labeled texts; how often the judge errs, in all and where the words do."""
    prompts = [row["prompt"] for row in pairs]
    of_judge, of_words = (
        [np.asarray(one(prompts, [row[side] for row in pairs]), dtype=float) for side in ("chosen", "rejected")]
        for one in (judge, words)
    )
    errs, words_err = (chosen <= rejected for chosen, rejected in (of_judge, of_words))
    together = correlation(np.concatenate(of_judge), np.concatenate(of_words), prompts * 2, seed=1, ranks=True)
    assert together is not None  # neither gives all texts the same
    return {
        "correlation": together.to_json(),
        "errs": proportion(int(errs.sum()), len(errs)).to_json(),
        "errs_where_words_err": proportion(int(errs[words_err].sum()), int(words_err.sum())).to_json(),
    }


def _policies(judge: Scores, samples: Sequence[Mapping[str, Any]], constants: Sequence[str]) -> dict[str, Any]:
    """Win rates over SFT on test prompts: PPO's, and the highest of a constant."""
    prompts = [row["prompt"] for row in samples]
    sft = judge(prompts, [row["sft"]["completion"] for row in samples])

    def over(texts: Sequence[str]) -> dict[str, Any]:
        return win_rate(judge(prompts, texts), sft, prompts).to_json()

    rates = [over([text] * len(samples)) for text in constants]
    return {
        "ppo": over([row["ppo"]["completion"] for row in samples]),
        "constant": max(rates, key=lambda rate: rate["value"]),
    }


def _judges(rows: Sequence[Mapping[str, Any]]) -> dict[str, Scores]:
    texts = [row["text"] for row in rows]
    remarks = [tokens_of(text) for text in texts]
    steps = Steps(remarks)
    found: dict[str, Scores] = {"classifier": ClassifierJudge.train(rows, seed=1)}
    if data := os.environ.get("RLHF_ZOO_DATA"):
        signs = lexicon(str(Path(data) / "opinion_lexicon"))
        found["lexicon"] = LexiconJudge(*([word for word in signs if signs[word] == sign] for sign in (1, -1)))
    return found | {
        "orientation": _of_tokens(Orientation(remarks)),
        "likelihood": _of_tokens(lambda words: float(np.mean(steps.logprobs(words)))),
        "orientation and weakest link": learn(texts),
        "two samples": _two_samples(remarks),
        "belongs to its opening": _own_continuation(remarks),
        "information": _of_tokens(_information(remarks)),
    }


def _of_tokens(measure: Callable[[Tokens], float]) -> Scores:
    def scores(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [measure(tokens_of(a + b)) for a, b in zip(prompts, completions, strict=True)]

    return scores


def _information(remarks: Sequence[Tokens]) -> Callable[[Tokens], float]:
    """Nats of the different words of a text, by the share of remarks that hold each; of words in three or more."""
    held = Counter(word for remark in remarks for word in set(remark))
    return lambda words: sum(-math.log(held[word] / len(remarks)) for word in set(words) if held[word] >= 3)


def _openings(remarks: Sequence[Tokens], rng: random.Random) -> list[int]:
    """How many words of each are its opening."""
    return [min(rng.randint(1, 3), len(remark)) for remark in remarks]


def _two_samples(remarks: Sequence[Tokens]) -> Scores:
    """A classifier of people's remarks against bigrams' after the same openings: up to three words in a row."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    rng, after = random.Random(1), defaultdict(list)
    for remark in remarks:
        for word, following in zip(remark, [*remark[1:], None], strict=True):
            after[word].append(following)
    made = []
    for remark, opening in zip(remarks, _openings(remarks, rng), strict=True):
        words = list(remark[:opening])
        while words and len(words) < 40 and (following := rng.choice(after[words[-1]])) is not None:
            words.append(following)
        made.append(words)
    features = TfidfVectorizer(analyzer=_grams, sublinear_tf=True, min_df=2)
    table = features.fit_transform([*remarks, *made])
    model = LogisticRegression(C=4.0, max_iter=300).fit(table, [1] * len(remarks) + [0] * len(made))
    return lambda a, b: model.decision_function(
        features.transform([tokens_of(x + y) for x, y in zip(a, b, strict=True)])
    )


def _grams(words: Tokens) -> list[str]:
    return [" ".join(words[k : k + n]) for n in (1, 2, 3) for k in range(len(words) - n + 1)]


def _own_continuation(remarks: Sequence[Tokens]) -> Scores:
    """A classifier of openings with their own continuation against those with another's, by pairs of their words."""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression

    rng = random.Random(1)
    parts = [
        (remark[:opening], remark[opening:]) for remark, opening in zip(remarks, _openings(remarks, rng), strict=True)
    ]
    others = [behind for _, behind in parts]
    rng.shuffle(others)
    features = FeatureHasher(2**20, input_type="string")
    own = [_met(opening, behind) for opening, behind in parts]
    dealt = [_met(opening, other) for (opening, _), other in zip(parts, others, strict=True)]
    model = LogisticRegression(max_iter=500).fit(features.transform([*own, *dealt]), [1] * len(own) + [0] * len(dealt))
    return lambda a, b: model.decision_function(
        features.transform([_met(tokens_of(x), tokens_of(y)) for x, y in zip(a, b, strict=True)])
    )


def _met(opening: Tokens, behind: Tokens) -> list[str]:
    joint = [f"{(opening or [''])[-1]}|{' '.join(behind[:n])}" for n in (1, 2)]
    return [*joint, *(f"{a}&{b}" for a in set(opening) for b in set(behind) if a[0].isalnum() and b[0].isalnum())]
