#!/usr/bin/env bash
# scores of Generator.generate_batch of ctranslate2. Guess: the sum of log P of the generated
# tokens, or of what the tokens were drawn from. It is their mean, in greedy and drawn text too
# (length_penalty is 1, and beam_size does not matter). A temperature and top-k are not in it, a
# repetition penalty is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q ctranslate2==4.8.5 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'END'
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

print("ctranslate2", ctranslate2.__version__)
rng, D, V = np.random.default_rng(0), 8, 12
tokens = ["<s>", "</s>", "<unk>", *(f"t{i}" for i in range(V - 3))]
spec = transformer_spec.TransformerDecoderModelSpec.from_config(
    1, 2, activation=common_spec.Activation.GELU
)


def fill(linear, *shape):
    linear.weight, linear.bias = rng.normal(size=shape).astype("f"), np.zeros(shape[0], "f")


layer, decoder = spec.decoder.layer[0], spec.decoder
for norm in (decoder.layer_norm, layer.self_attention.layer_norm, layer.ffn.layer_norm):
    norm.gamma, norm.beta = np.ones(D, "f"), np.zeros(D, "f")
decoder.embeddings.weight, decoder.scale_embeddings = rng.normal(size=(V, D)).astype("f"), False
decoder.position_encodings.encodings = rng.normal(size=(64, D)).astype("f")
fill(decoder.projection, V, D)
fill(layer.self_attention.linear[0], 3 * D, D)
fill(layer.self_attention.linear[1], D, D)
fill(layer.ffn.linear_0, 16, D)
fill(layer.ffn.linear_1, D, 16)
spec.register_vocabulary(tokens)
spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = tokens[:3]
spec.validate()
Path("model").mkdir()
spec.save("model")
model = ctranslate2.Generator("model")
drawn = {"sampling_topk": 5, "sampling_temperature": 2.0}
for options in ({}, {"length_penalty": 0}, drawn, {"repetition_penalty": 1.5}):
    prompt = ["<s>", "t3"]
    found = model.generate_batch(
        [prompt], max_length=8, return_scores=True, include_prompt_in_result=False, **options
    )[0]
    text = found.sequences[0]
    log_prob = np.array(model.score_batch([prompt + text])[0].log_probs)[1:]
    score = found.scores[0]
    print(options, len(text), "tokens: score", score, "sum", log_prob.sum(), "mean", log_prob.mean())
    expected = log_prob.sum() if "length_penalty" in options else log_prob.mean()
    assert len(text) == 8 and (abs(score - expected) < 1e-3) == ("repetition_penalty" not in options)
END
