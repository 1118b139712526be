"""A tiny model that brings its own program code: a Qwen3 under a name that transformers does not know.

Its sequence classifier stands in a file of its own, which nothing but `auto_map` names.
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


def save(folder: Path, *, ran: Path | None = None) -> Path:
    """ran: a file that its code writes when it runs."""
    miniatures.save("Qwen3-Base", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": MODEL_TYPE, "architectures": ["StrangeForCausalLM"], "auto_map": CLASSES}
    (folder / "config.json").write_text(json.dumps(config))
    mark = "" if ran is None else f"open({str(ran)!r}, 'w').close()\n"
    for name, text in (("configuration", CONFIGURATION), ("modeling", MODELING), ("scoring", SCORING)):
        (folder / f"{name}_strange.py").write_text(mark + text)
    return folder
