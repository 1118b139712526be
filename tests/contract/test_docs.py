"""docs/metrics.md explains every metric that the trainer logs, and no other."""

import re
from pathlib import Path

from datasets import Dataset
from trainer_fixture import good, make_reward_model, make_trainer, prompt_rows

ROOT = Path(__file__).parents[2]
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
OUR_PREFIXES = (
    "objective/",
    "policy/",
    "critic/",
    "loss",
    "completions/",
    "rewards/",
    "grad_norm/",
    "value/",
    "kl_coef",
    "episodes",
    "skipped_steps",
    "time/",
    "tokens_per_second",
)


def test_metrics_page_explains_every_logged_metric(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, max_steps=3, reward_funcs=good, reward_model=make_reward_model(), kl_in="loss", kl_estimator="k2",
        ptx_coef=0.1, ptx_dataset=Dataset.from_dict({"text": ["abc", "ggg"]}), score_scaling="running",
        train_dataset=prompt_rows(16),
    )  # fmt: skip
    trainer.train()
    logged = {
        name for row in trainer.state.log_history for name in row if "loss" in row and name.startswith(OUR_PREFIXES)
    }
    assert len(logged) >= 32
    logged = {re.sub(r"^rewards/.*", "rewards/NAME", name) for name in logged}
    explained = set(re.findall(r"`([a-z_]+(?:/[A-Za-z_0-9/]+)?)`", METRICS))
    explained |= {f"critic/explained_variance/quarter_{part}" for part in (2, 3, 4)}
    assert logged <= explained, logged - explained


def test_metrics_page_names_only_logged_metrics() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rlhf_zoo/ppo").glob("*.py"))
    rows = re.findall(r"^\| (`[^|]+`) \|", METRICS, flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([a-z_]+/[a-z_]+)", row)]
    assert len(names) >= 25
    for name in names:
        prefix = name.partition("/")[0] + "/"
        assert name in code or f'f"{prefix}' in code, name
