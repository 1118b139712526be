"""Probes for a hacked reward: they compare a policy's texts with SFT's, or any two language models' texts.

    report = probe(Completions(prompts, texts), Completions(prompts, sft_texts))
    report.fired, report["risen phrases"].finding, report.to_json()

Nothing here samples, scores or loads a model. Texts are only counted, never executed.
"""

from .families import FAMILIES
from .report import Probe, Report, probe
from .texts import Completions

__all__ = ["FAMILIES", "Completions", "Probe", "Report", "probe"]
