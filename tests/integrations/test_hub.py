"""Folders of models with a head, as transformers alone and other processes load them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hstree.heads import MixtureOfSoftmaxes, TreeEnsemble

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        PreTrainedTokenizerFast,
    )

    from hstree.integrations.transformers import CONFIG_KEY, from_pretrained, replace_lm_head

V, D = 50, 8
SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 1}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.arange(12).view(2, 6)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES, **NONE, n_positions=32)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **NONE, intermediate_size=16)).eval()


def mamba() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**SIZES, **NONE, state_size=4)).eval()


@pytest.mark.parametrize("make", [gpt2, llama, mamba])
@pytest.mark.parametrize("head", ["trees", None], ids=["trees", "its softmax"])
@pytest.mark.parametrize("trust", [None, False])
def test_transformers_alone_refuses_it(
    make: Any, head: str | None, trust: Any, tmp_path: Path
) -> None:
    """With and without the class of the model: never another lm_head."""
    model = make()
    replace_lm_head(model, head)
    model.save_pretrained(tmp_path)
    path = str(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoConfig.from_pretrained(path, trust_remote_code=trust)
    code = (tmp_path / "modeling_hstree.py").read_text(encoding="utf-8")
    assert "pip install 'hstree[transformers]'" in code
    with pytest.raises(Exception, match=r"pip install 'hstree\[transformers\]'"):
        getattr(transformers, type(model).__name__).from_pretrained(path)
    with pytest.raises(Exception, match=r"pip install 'hstree\[transformers\]'"):
        type(make().config).from_pretrained(path)
    assert from_pretrained(path)(IDS).logits.equal(model(IDS).logits)


def test_the_config_is_restored(tmp_path: Path) -> None:
    plain = gpt2()
    model = gpt2()
    replace_lm_head(model)
    model.save_pretrained(tmp_path / "a")
    loaded = from_pretrained(tmp_path / "a")
    assert loaded.config.model_type == "gpt2"
    assert loaded.config.tie_word_embeddings is True
    expected, own = plain.config.to_dict(), loaded.config.to_dict()
    added = {CONFIG_KEY, "auto_map", "architectures", "dtype", "_name_or_path"}
    assert {k: own.get(k) for k in expected.keys() - added} == {
        k: expected[k] for k in expected.keys() - added
    }
    loaded.save_pretrained(tmp_path / "b")
    for name in ("config.json", "modeling_hstree.py"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert type(loaded).from_pretrained(tmp_path / "b")(IDS).logits.equal(model(IDS).logits)


def test_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    """It has the config of a plain model, with the entry of the head."""
    model = replace_lm_head(gpt2())
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    head = config[CONFIG_KEY]
    config["model_type"] = head.pop("body_type")
    config["tie_word_embeddings"] = head.pop("tie_word_embeddings")
    del config["auto_map"]
    file.write_text(json.dumps(config), encoding="utf-8")
    assert from_pretrained(tmp_path)(IDS).logits.equal(model(IDS).logits)


def _set(key: str, value: Any) -> Any:
    def damage(config: dict[str, Any]) -> None:
        config[CONFIG_KEY][key] = value

    return damage


DAMAGES: dict[str, Any] = {
    "text": lambda config: config.update({CONFIG_KEY: "trees"}),
    "list": lambda config: config.update({CONFIG_KEY: [1]}),
    "no name": lambda config: config[CONFIG_KEY].pop("name"),
    "no config": lambda config: config[CONFIG_KEY].pop("config"),
    "another name": _set("name", "nothing"),
    "another head": _set("name", "mos"),
    "a number as name": _set("name", 3),
    "another model": _set("body_type", "nothing"),
    "no model": _set("body_type", None),
    "an empty config": _set("config", {}),
    "a text as size": lambda config: config[CONFIG_KEY]["config"].update(n_classes="x"),
    "another size": lambda config: config[CONFIG_KEY]["config"].update(n_classes=V + 1),
    "an unknown option": lambda config: config[CONFIG_KEY]["config"].update(nothing=1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["trees", "softmax"])
def test_a_damaged_entry_names_the_file(damage: str, kind: str, tmp_path: Path) -> None:
    model = replace_lm_head(gpt2(), kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    DAMAGES[damage](config)
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{file}: {CONFIG_KEY}: ") as error:
        from_pretrained(tmp_path)
    assert "expected" in str(error.value)
    assert "got" in str(error.value)


def test_damaged_weights_name_a_file(tmp_path: Path) -> None:
    model = replace_lm_head(gpt2(), "trees")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = next(name for name in tensors if name.startswith("lm_head.head."))
    save_file({n: t.clone() for n, t in tensors.items() if n != missing}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)config.json: hstree_head: .*" + missing[-6:]):
        from_pretrained(tmp_path)


ELSEWHERE = """
import sys, warnings; warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
folder, what = sys.argv[1:]
if what == "without hstree":
    sys.modules["hstree"] = None  # import raises ModuleNotFoundError
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "hstree":
                raise ModuleNotFoundError("No module named 'hstree'", name="hstree")
    del sys.modules["hstree"]
    sys.meta_path.insert(0, Finder())
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ImportError as error:
        print(error)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.arange(12).view(2, 6)
    torch.save(model(ids).logits, f"{folder}/logits.pt")
    text = pipeline("text-generation", folder, trust_remote_code=True)
    (out,) = text("w3 w4", max_new_tokens=4, do_sample=False)
    print(out["generated_text"])
    half = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16
    )
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__ == (
        "HeadGPT2Config"
    )
    for load in (AutoModel.from_pretrained, AutoModelForCausalLM.from_config):
        try:
            load(folder, trust_remote_code=True) if load == AutoModel.from_pretrained else load(
                model.config, trust_remote_code=True
            )
        except ValueError:
            pass
        else:
            raise AssertionError(load)
    # A model without a head is loaded as before.
    from transformers import GPT2Config, GPT2LMHeadModel
    plain = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=50)).eval()
    plain.save_pretrained(f"{folder}/plain")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/plain")
    assert type(again) is GPT2LMHeadModel
    assert again(ids).logits.equal(plain(ids).logits)
"""


def elsewhere(folder: Path, what: str) -> str:
    """Standard output of a new process that loads the folder, with a cache of its own."""
    environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), what],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def with_tokenizer(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    words = models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
    fast.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["trees", "mos", "tied"])
def test_another_process_loads_it_with_transformers(head: str, tmp_path: Path) -> None:
    model = gpt2()
    made = {
        "trees": lambda: TreeEnsemble.from_linear(
            model.lm_head, tied=False, n_trees=2, root=8, leaf=4
        ),
        "mos": lambda: MixtureOfSoftmaxes(D, V, components=2),
        "tied": lambda: None,
    }[head]()
    replace_lm_head(model, made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with_tokenizer(model, tmp_path)
    text = elsewhere(tmp_path, "with hstree")
    assert torch.load(tmp_path / "logits.pt").equal(model(IDS).logits)
    new = model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False)[0, 2:]
    assert text.split()[-3:] == [f"w{token}" for token in new.tolist()][-3:]


@pytest.mark.slow
def test_without_hstree_the_command_that_installs_it(tmp_path: Path) -> None:
    replace_lm_head(gpt2()).save_pretrained(tmp_path)
    assert "Run `pip install hstree`" in elsewhere(tmp_path, "without hstree")
