"""PPO defaults are defined in its dataclass only; cards, `new`, baselines and published runs read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from toy_run import make_context, make_recipe

from rlhf_zoo.pipeline.experiments.baseline import default_betas
from rlhf_zoo.pipeline.new.recipe import _render
from rlhf_zoo.ppo.config import PPOConfig
from rlhf_zoo.publishing.cards.kl import kl_settings
from rlhf_zoo.publishing.catalog.card import Card
from rlhf_zoo.publishing.catalog.lineage import Lineage
from rlhf_zoo.runs.settings import declared

CHANGED = {"kl_coef": 0.11, "temperature": 0.9, "response_length": 71, "cliprange": 0.3, "lam": 0.8}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PPOConfig with other defaults: in its fields, and in the source that is read where importing it is too slow."""
    source = declared._find_class

    def altered(module: str, name: str) -> tuple[Path, ast.Module]:
        path, tree = source(module, name)
        if name == "PPOConfig":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                key = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else None
                if key in CHANGED and isinstance(node.value, ast.Call):
                    node.value.args[0] = ast.Constant(CHANGED[key])
        return path, tree

    monkeypatch.setattr(declared, "_find_class", altered)
    for key, value in CHANGED.items():
        monkeypatch.setattr(PPOConfig.__dataclass_fields__[key], "default", value)
    declared.declared_keys.cache_clear()
    yield
    declared.declared_keys.cache_clear()


def render_ppo_template() -> dict[str, Any]:
    names = (
        "updates", "rollout", "prompt_length", "episodes", "micro_batch", "accumulation_steps", "response_length",
        "save_steps",
    )  # fmt: skip
    keys = {"dataset_config": None, "dataset_train_split": "train", "dataset_test_split": None, "columns": {}}
    data = SimpleNamespace(name="x")
    variables = {
        "sizes": {**dict.fromkeys(names, 8), "held_out_share": 0.1, "cache_tokens": None},
        "memory": {}, "functions": ["length"], "shared": data,
        "data_by_stage": {"ppo": SimpleNamespace(data_set=data, keys=keys)}, "reward_model": None, "label": None,
        "lora": False, "bfloat16": False, "adamw_8bit": False, "rank": 8, "shared_critic": False,
        "model": SimpleNamespace(name="org/m", title="m", revision=None, spare_pad_token=None),
    }  # fmt: skip
    return yaml.safe_load(_render("ppo", variables))


def test_changed_default_reaches_card_template_and_baselines(changed: None, tmp_path: Path) -> None:
    facts: Any = SimpleNamespace(setting=lambda key, default=None: default, metrics=[])
    card = kl_settings(facts)
    assert {key: card[key] for key in ("kl_coef", "temperature", "response_length")} == {
        "kl_coef": 0.11, "temperature": 0.9, "response_length": 71,
    }  # fmt: skip
    written = render_ppo_template()
    assert {key: written[key] for key in ("kl_coef", "cliprange", "lam")} == {
        "kl_coef": 0.11, "cliprange": 0.3, "lam": 0.8,
    }  # fmt: skip
    make_recipe(tmp_path, ppo={"kl_coef": 0.0})
    assert default_betas(make_context(tmp_path)) == [0.055, 0.11, 0.22]
    assert Card({"settings": {}}).beta == 0.11 and Card({}).beta is None


def test_published_run_falls_back_to_ppo_defaults() -> None:
    """Its card holds the keys that its recipe sets; the page and `eval` took temperature 1.0 for a key left out."""
    lineage = Lineage.__new__(Lineage)
    object.__setattr__(lineage, "card", {"settings": {"kl_coef": 0.1}})
    assert (lineage.setting("temperature", 1.0), lineage.setting("response_length", 32)) == (
        PPOConfig.temperature, PPOConfig.response_length,
    )  # fmt: skip
    object.__setattr__(lineage, "card", {})
    assert lineage.setting("temperature", 1.0) == 1.0, "a model without a card had no such default"
