"""Folders of models with a head of hstree: the config, the file of code and the head's tensors."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from hstree._files import read_tensors
from hstree._memory import ran_out
from hstree.heads import Head
from hstree.heads.registry import head_from_config
from hstree.heads.tying import HasWeight, tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as _Base
else:
    _Base = object

CONFIG_KEY = "hstree_head"
"""Key of the head's name and configuration in a model's config."""

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

_PREFIX = "Head"  # GPT2Config becomes HeadGPT2Config

_CODE = '''\
"""The lm_head of this model is an output layer of hstree: pip install 'hstree[transformers]'"""

from hstree.integrations.transformers import HeadConfig, HeadForCausalLM
'''

_WRITTEN = {
    # Transformers knows no model of this type and follows auto_map, if trust_remote_code is True.
    "model_type": "hstree",
    "auto_map": {
        "AutoConfig": "modeling_hstree.HeadConfig",
        "AutoModelForCausalLM": "modeling_hstree.HeadForCausalLM",
    },
    # GPT2LMHeadModel.from_pretrained would only warn of the type and make a random lm_head. Its
    # config class accepts no string here: the error that it raises shows this sentence.
    "tie_word_embeddings": (
        "The lm_head of this model is an output layer of hstree: pip install "
        "'hstree[transformers]', then load it with hstree.integrations.transformers."
        "from_pretrained or AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)."
    ),
}
"""Written over the values of a config, which are saved with the head."""

_SAVED = {"model_type": "body_type", "tie_word_embeddings": "tie_word_embeddings"}
"""Those values and their names in the entry of the head. Transformers would take an entry with the
model_type of a class for the config of that class."""


class ConfigWithHead(_Base):  # type: ignore[misc]
    """Overrides of the config of a model with a head."""

    body_class: type[PreTrainedConfig]

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write the config, and the code that ``auto_map`` names next to it."""
        config = json.loads(self.to_json_string(use_diff))
        saved = {name: config[key] for key, name in _SAVED.items() if key in config}
        written = config | _WRITTEN | {CONFIG_KEY: config[CONFIG_KEY] | saved}
        path = Path(json_file_path)
        path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        path.with_name("modeling_hstree.py").write_text(_CODE, encoding="utf-8")

    @classmethod
    def get_config_dict(
        cls, path: str | os.PathLike[str], **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config without what :meth:`to_json_file` wrote over it."""
        config, unused = PreTrainedConfig.get_config_dict(path, **options)
        head = checked_head(path, config)
        config |= {key: head.pop(name) for key, name in _SAVED.items() if name in head}
        return config, unused


@functools.cache
def config_with_head(config_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The subclass for models with a head. The mappings of transformers do not know its name:
    ``AutoModel...from_pretrained`` refuses it where ``auto_map`` names no class."""
    if issubclass(config_class, ConfigWithHead):
        return config_class
    members = {"body_class": config_class, "__module__": __name__, "__doc__": config_class.__doc__}
    return type(f"{_PREFIX}{config_class.__name__}", (ConfigWithHead, config_class), members)


def __getattr__(name: str) -> Any:
    """The classes that pickle and torch.save look up by name, such as HeadGPT2Config."""
    body = getattr(transformers, name.removeprefix(_PREFIX), None)
    if name.startswith(_PREFIX) and isinstance(body, type) and issubclass(body, PreTrainedConfig):
        return config_with_head(body)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class HeadConfig:
    """Reads the config of any model with a head."""

    @staticmethod
    def register_for_auto_class(auto_class: Any = None) -> None:
        """Called by transformers, which would copy the source code of a registered class."""

    @staticmethod
    def from_pretrained(path: str | os.PathLike[str], **options: Any) -> Any:
        """As ``transformers.AutoConfig.from_pretrained``.

        Raises:
            ValueError: if the config has no head of hstree, or a damaged one.
        """
        config, _ = PreTrainedConfig.get_config_dict(path, **options)
        model_type = checked_head(path, config).get("body_type", config.get("model_type"))
        if model_type not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"{_config_file(path)}: {CONFIG_KEY}: body_type: expected a model of transformers "
                f"{transformers.__version__}, got {model_type!r}"
            )
        config_class = config_with_head(transformers.CONFIG_MAPPING[model_type])
        return config_class.from_pretrained(path, **options)


def checked_head(path: str | os.PathLike[str], config: dict[str, Any]) -> dict[str, Any]:
    """The entry of the head in a config."""
    if CONFIG_KEY not in config:
        raise ValueError(
            f"path: expected a model with a head of hstree, got {os.fspath(path)}, whose config "
            f"has no {CONFIG_KEY}"
        )
    head = config[CONFIG_KEY]
    if not isinstance(head, dict):
        raise ValueError(f"{_config_file(path)}: {CONFIG_KEY}: expected a dict, got {head!r:.80}")
    for name, kind in (("name", str), ("config", dict)):
        if not isinstance(head.get(name), kind):
            raise ValueError(
                f"{_config_file(path)}: {CONFIG_KEY}: {name}: expected a {kind.__name__}, got "
                f"{head.get(name)!r:.80}"
            )
    return head


def saved_head(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    embedding: HasWeight,
) -> Head:
    """The head of a saved model, tied to its embedding if it was.

    Raises:
        ValueError: if the config and the tensors are not those of a head; the message names the
            config.
    """
    saved = checked_head(path, config)
    try:
        with torch.device("meta"):
            head = head_from_config(saved, tensors, embedding)
        tied = dict.fromkeys(tied_names(head, embedding), embedding.weight)
        head.load_state_dict({**tensors, **tied}, assign=True)
    except Exception as error:  # whatever damaged files lead to
        if ran_out(error):
            raise
        raise ValueError(
            f"{_config_file(path)}: {CONFIG_KEY}: expected the configuration of the head whose "
            f"tensors are saved with it, got one that is damaged or of another version of hstree: "
            f"{type(error).__name__}: {error}"
        ) from error
    return head


def read_head_tensors(
    path: str | os.PathLike[str], prefix: str, hub: dict[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a saved model whose names start with ``prefix``, named without it."""
    try:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **hub)
    except OSError:
        files = [cached_file(path, SAFE_WEIGHTS_NAME, **hub)]
    else:
        files, _ = get_checkpoint_shard_files(path, index, **hub)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= read_tensors(file, prefix)[0]
        except SafetensorError as error:
            raise ValueError(
                f"{file}: expected a file of safetensors, got a damaged one: {error}"
            ) from error
    return tensors


def _config_file(path: str | os.PathLike[str]) -> str:
    return f"{os.fspath(path)}/config.json"
