"""A stage outside the package: all the code of a new stage, except its template and YAML."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_zoo.modeling.models import build_causal
from rlhf_zoo.modeling.special_tokens import train_tokenizer
from rlhf_zoo.pipeline.stages.train import train_stage
from rlhf_zoo.pipeline.stages.trainers import make_trainer
from rlhf_zoo.publishing import plots
from rlhf_zoo.publishing.cards.data import DataPart, trained_on
from rlhf_zoo.publishing.cards.facts import StageFacts
from rlhf_zoo.publishing.cards.parts import Draw, Metric, StageCard
from rlhf_zoo.runs.context import Publisher, RunContext
from rlhf_zoo.runs.dataset import data_source
from rlhf_zoo.runs.registry import Stage


@dataclass(frozen=True)
class ToyArguments:
    """Arguments of the stage: the split that it trains on."""

    dataset_train_split: str = "train"
    evaluated_split: None = None


def run(context: RunContext, publisher: Publisher | None = None) -> bool:
    from trl import SFTTrainer

    start_time, settings, source = time.monotonic(), context.settings("toy"), data_source(context)

    def build() -> Any:
        texts = source.load("lines", settings.data.dataset_train_split, columns=["text"])
        tokenizer = train_tokenizer(texts["text"], vocab_size=300, max_length=64)
        model = build_causal(settings.recipe.architecture or {}, tokenizer)
        return make_trainer(SFTTrainer, settings, model=model, train_dataset=texts, processing_class=tokenizer)

    data = source.lineage
    return train_stage(
        context, settings, data_lineage=data, parents={}, start_time=start_time, build=build, publisher=publisher
    )


def _model_index_metrics(facts: StageFacts) -> Iterator[tuple[DataPart, list[Metric]]]:
    yield trained_on(facts), [("loss", facts.latest_metrics.get("loss"), "loss of the toy")]


def _draw(facts: StageFacts, draw: Draw) -> None:
    options = {"title": "Loss", "unit": "nats", "mark": facts.plot_marker_step}
    draw("loss", "Loss of the toy", plots.plot_curves, facts.metrics, {"loss": "training"}, **options)


CARD = StageCard(
    template=Path(__file__).with_name("toy.md.jinja"),
    columns={"loss": "loss"},
    required_column="loss",
    json_columns={"loss": "loss"},
    model_index_metrics=_model_index_metrics,
    draw=_draw,
    variables=lambda facts: {"toy_loss": facts.latest_metrics.get("loss")},
    unmeasured=lambda facts: ["everything except its loss"],
    evaluated_step_figures="a figure of the toy",
)
TOY = Stage(
    name="toy",
    title="toy model",
    note="toy",
    summary="Train the toy of a recipe.",
    example="rlhf-zoo toy my-recipe",
    arguments="toy_stage:ToyArguments",
    trainer="trl:SFTConfig",
    run="toy_stage:run",
    card="toy_stage:CARD",
    starts_from=(),
    metrics=("eval_loss",),
    model_keys=(),
    figures={"loss": ("checkpoints", "loss")},
)
