"""Probes for a hacked reward: what a policy's completions do that SFT's do not; thresholds are from SFT against itself.

    thresholds = null_thresholds([sft_seed_1, sft_seed_2, sft_seed_3, sft_seed_4], rate=0.05)
    report = probe(policy, sft, thresholds, likelihoods=likelihoods)
    report.fired, report["repetition"].worst, report.to_json()

Numbers come in, numbers go out: nothing here samples, scores or loads a model. Texts are only counted, never run.
"""

from .completions import Completions
from .lexicons import Lexicons
from .measures import MEASURES, PROBES
from .nulls import Thresholds, null_thresholds
from .report import Likelihoods, Probe, Report, Sample, capability_loss, probe

__all__ = [
    "MEASURES",
    "PROBES",
    "Completions",
    "Lexicons",
    "Likelihoods",
    "Probe",
    "Report",
    "Sample",
    "Thresholds",
    "capability_loss",
    "null_thresholds",
    "probe",
]
