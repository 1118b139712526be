"""Probes for a hacked reward: what a policy's completions do that SFT's do not, on any language model's text.

    report = probe(Completions(prompts, texts), Completions(prompts, sft_texts))
    report.fired, report["risen phrases"].finding, report.to_json()

Nothing here samples, scores or loads a model. Texts are only counted, never executed.
"""

from .families import FAMILIES
from .report import Probe, Report, probe
from .texts import Completions

__all__ = ["FAMILIES", "Completions", "Probe", "Report", "probe"]
