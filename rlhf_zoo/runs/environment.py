"""Environment variables that change what training computes.

The recipe determines how a run trains. A variable that contradicts it is ignored with a warning, refused, or recorded
in run.json; none takes effect silently.
"""

import logging
import os
from collections.abc import Mapping

from ..errors import ZooError

log = logging.getLogger(__name__)

#: Variable of accelerate -> the key of the recipe with the same effect. The variable is unset, so that the key applies.
IGNORED_VARIABLES: Mapping[str, str] = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DOWNCAST_BF16": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "max_grad_norm",
    "ACCELERATE_DYNAMO_BACKEND": "torch_compile_backend",
    "ACCELERATE_DYNAMO_MODE": "torch_compile_mode",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "torch_compile",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "torch_compile",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "torch_compile",
}
#: Variables that select a training system that no stage has been tested with.
REFUSED_VARIABLES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
#: Variables that change the device, the rounding or the order of sums. (Threads and CPU instructions are recorded as
#: torch reports them; `use_cpu` or ACCELERATE_USE_CPU selects the CPU.)
RECORDED_VARIABLES = (
    "ACCELERATE_TORCH_DEVICE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
    "TRANSFORMERS_SDPA_FORCE_GQA",
    "USE_HUB_KERNELS",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_BF16",
)
# Values that `accelerate launch` sets for options that are off.
_OFF_VALUES = ("", "0", "1", "no", "none", "off", "false", "default")


def apply_environment() -> None:
    """Refuses `REFUSED_VARIABLES`, unsets `IGNORED_VARIABLES`, and warns about each of the latter that was on.

    Raises:
        ZooError: A variable asks for DeepSpeed, FSDP, Megatron-LM or accelerate's parallelism.
    """
    for name in REFUSED_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            raise ZooError(
                f"The environment sets {name}={os.environ[name]}, which no stage supports: unset it, and set the key "
                "fsdp2 to shard a model."
            )
    for name, key in IGNORED_VARIABLES.items():
        value = os.environ.pop(name, "")
        if value.lower() not in _OFF_VALUES:
            log.warning("%s=%s in the environment is ignored: set the key %s instead.", name, value, key)


def recorded_variables() -> dict[str, str]:
    """Returns the variables of `RECORDED_VARIABLES` that are set, for `versions` in run.json."""
    return {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ}
