"""Answers the training tasks of the corpus, without instructions: the source of its demonstrations.

    python -m rlhf_zoo.runs.corpora.instructions HuggingFaceTB/SmolLM2-135M-Instruct answers --hub local
    rlhf-zoo run smollm2-ifeval-sft --hub local --dataset_name answers

Answers are sampled at temperature 0.7 and written to FOLDER/train.jsonl, from which a second call resumes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ....errors import ZooError
from ....hub.client.connect import choose_hub, connect
from ...answers import resume_answers, sample_answers
from . import split_of
from .tasks import tasks

TEMPERATURE = 0.7
TOKENS = 160
BATCH = 128


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Its arguments; None for those of the command line.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder, Hub id or GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--hub", help="the Hub with the model: 'local' or an address (default: as for rlhf-zoo run)")
    parser.add_argument("--limit", type=int, help="number of tasks (default: all)")
    parser.add_argument("--bf16", action="store_true", help="sample in bfloat16, which some CPUs do faster")
    options = parser.parse_args(arguments)
    training_tasks = [task.text for task in tasks() if split_of(task) == "train"][: options.limit]
    prompts = [[{"role": "user", "content": text}] for text in training_tasks]
    path = options.folder / "train.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        settings = {"temperature": TEMPERATURE, "max_tokens": TOKENS, "batch_size": BATCH, "bf16": options.bf16}
        resume_answers(
            path, prompts, lambda answered: sample_answers(options.model, hub, prompts, answered, **settings)
        )
    sys.stdout.write(f"{path} has {len(prompts)} answers.\n")


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on from there.")
