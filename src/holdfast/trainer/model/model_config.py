"""The transformers config of a model, without its weights and without torch: errors of transformers become one line."""

import logging

import transformers
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from holdfast.errors import DataError

_log = logging.getLogger("trainer")

_MOST_CHARACTERS = 300  # of another library's message


def load_model_config(name: str) -> PreTrainedConfig:
    """Return the transformers config of a local directory or hub model. Raise DataError if it cannot be trained."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # else it asks at a terminal
    except Exception as error:
        _log.debug("the model config was not loaded", exc_info=True)
        if any(words in str(error) for words in ("trust_remote_code", "does not recognize this architecture")):
            raise DataError(
                f"model.name = '{name}': transformers {transformers.__version__} has no such kind of model (model_type "
                "in its config.json), and code that a model brings along is not run. docs/models.md lists the kinds "
                "that can be trained."
            ) from error
        raise DataError(f"model.name = '{name}': no model config could be loaded. {one_line(error)}") from error
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise DataError(
            f"model.name = '{name}': its weights are quantised ({getattr(method, 'value', method)}, see "
            "quantization_config in its config.json), and only weights in float32, bfloat16 or float16 can be trained: "
            "give the model that it was made from"
        )
    return config


def is_classifier(model_config: PreTrainedConfig) -> bool:
    """Whether a directory holds a model that scores sequences instead of predicting tokens."""
    return any(name.endswith("ForSequenceClassification") for name in model_config.architectures or [])


def one_line(error: Exception) -> str:
    """Return the message of another library in one line of limited length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
