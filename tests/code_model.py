"""A tiny model with remote code: a Qwen3 whose model type transformers does not know.

Its sequence classifier is in a separate file, which only `auto_map` names.
"""

import json
from pathlib import Path

import miniatures

MODEL_TYPE = "strange"
CONFIGURATION = f"""
from transformers import Qwen3Config

class StrangeConfig(Qwen3Config):
    model_type = {MODEL_TYPE!r}
"""
MODELING = """
from transformers import Qwen3ForCausalLM, Qwen3Model
from .configuration_strange import StrangeConfig

class StrangeModel(Qwen3Model):
    config_class = StrangeConfig

class StrangeForCausalLM(Qwen3ForCausalLM):
    config_class = StrangeConfig
"""
SCORING = """
from torch import nn
from transformers import Qwen3PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from .configuration_strange import StrangeConfig
from .modeling_strange import StrangeModel

class StrangeForSequenceClassification(GenericForSequenceClassification, Qwen3PreTrainedModel):
    config_class = StrangeConfig

    def __init__(self, config):
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = StrangeModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
"""
CLASSES = {
    "AutoConfig": "configuration_strange.StrangeConfig",
    "AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM",
    "AutoModelForSequenceClassification": "scoring_strange.StrangeForSequenceClassification",
}


def save(folder: Path, *, marker: Path | None = None) -> Path:
    """Saves the model in `folder`. marker: A file that the model's code creates when it runs."""
    miniatures.save("Qwen3-Base", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": MODEL_TYPE, "architectures": ["StrangeForCausalLM"], "auto_map": CLASSES}
    (folder / "config.json").write_text(json.dumps(config))
    write_marker = "" if marker is None else f"open({str(marker)!r}, 'w').close()\n"
    for name, source in (("configuration", CONFIGURATION), ("modeling", MODELING), ("scoring", SCORING)):
        (folder / f"{name}_strange.py").write_text(write_marker + source)
    return folder
