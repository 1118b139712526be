"""Answers the training tasks of the corpus `instructions`, without instructions: the source of its demonstrations.

    python benchmarks/task_answers.py HuggingFaceTB/SmolLM2-135M-Instruct answers --hub local
    rlhf-zoo run smollm2-ifeval-sft --hub local --dataset_name answers

Answers are sampled at temperature 0.7 and written to FOLDER/train.jsonl, from which a second call resumes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import ifeval

from rlhf_zoo.errors import ZooError
from rlhf_zoo.hub.client.connect import choose_hub, connect
from rlhf_zoo.runs.corpora.instructions import split_of
from rlhf_zoo.runs.corpora.instructions.tasks import tasks

TEMPERATURE = 0.7
TOKENS = 160
BATCH = 128


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, Hub id or GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--hub", default="local", help="the Hub with the model: 'local' or an address")
    parser.add_argument("--limit", type=int, help="number of tasks (default: all)")
    parser.add_argument("--bf16", action="store_true", help="sample in bfloat16 (see cpu_precision.py)")
    options = parser.parse_args(arguments)
    rows = [{"prompt": task.text} for task in tasks() if split_of(task) == "train"][: options.limit]
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "train.jsonl"
    with connect(choose_hub(options.hub, push_to_hub=False)) as hub:
        ifeval.resume_answers(
            path,
            rows,
            lambda done: ifeval.sample_answers(
                options.model, hub, rows, done, temperature=TEMPERATURE, batch=BATCH, tokens=TOKENS, bf16=options.bf16
            ),
        )
    print(f"{path} has {len(rows)} answers.")


if __name__ == "__main__":
    try:
        main()
    except ZooError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on from there.")
