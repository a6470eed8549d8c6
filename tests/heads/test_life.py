"""What happens to a head beside training: the meta device, dtypes, inference mode, compilation."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn

from heads.support import HEADS, SOME, D, V, draw, draw_targets, make, randomise
from hstree.heads import Head, HeadOutput, Softmax, TreeEnsemble, load_head
from hstree.heads.state import Tables

every_head = pytest.mark.parametrize("kind", HEADS)
some_heads = pytest.mark.parametrize("kind", SOME)


def on_meta(kind: str, **options: Any) -> Head:
    with torch.device("meta"):
        head = HEADS[kind](**options)
    assert all(parameter.is_meta for parameter in head.parameters())
    return head


def tables(head: Head) -> dict[str, Tensor]:
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in head.named_modules()
        if isinstance(module, Tables)
        for name in module.tables()
    }


def emptied(head: Head) -> Head:
    """to_empty, with garbage for certain in what it makes."""
    return head._apply(lambda t: torch.full_like(t, 101, device="cpu"))


def check_equal(got: Head, wanted: Head) -> None:
    hidden, target = draw(5, D), draw_targets(5)
    # Kernels add in another order where tensors are aligned otherwise.
    torch.testing.assert_close(got.log_prob(hidden), wanted.log_prob(hidden))
    torch.testing.assert_close(got(hidden, target).output, wanted(hidden, target).output)
    assert torch.equal(got.topk(hidden, 3)[1], wanted.topk(hidden, 3)[1])
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(
        got.sample(hidden, generator=seeds[0]), wanted.sample(hidden, generator=seeds[1])
    )
    state = wanted.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in got.state_dict().items())


@every_head
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_meta_then_load(kind: str, assign: bool) -> None:
    wanted, head = make(kind), on_meta(kind)
    if not assign:
        head = emptied(head)
    head.load_state_dict(wanted.state_dict(), assign=assign)
    check_equal(head, wanted)
    assert not any(tensor.is_meta for tensor in (*head.parameters(), *head.buffers()))
    head(draw(5, D), draw_targets(5)).loss.backward()


@every_head
def test_deferred_initialisation(kind: str) -> None:
    """Of a head on the meta device: what the constructor makes from the same random numbers."""
    torch.manual_seed(3)
    options = {"class_weight": [0.5] * (V - 1) + [2.0]}
    wanted = HEADS[kind](**options)
    head = emptied(on_meta(kind, **options))
    torch.manual_seed(3)
    if wanted.config().get("tied"):  # the model's own embedding is not reset
        nn.Embedding(V, D)
    head.reset_parameters()
    assert torch.equal(head.class_weight, wanted.class_weight)
    for key, value in wanted.state_dict().items():
        if not (wanted.config().get("tied") and key in ("weight", "below.weight")):
            assert torch.equal(head.state_dict()[key], value), key
    if not wanted.config().get("tied"):
        check_equal(head, wanted)


@every_head
def test_modules_reset_one_by_one(kind: str) -> None:
    """As FSDP2's recipe does, the head first, then the modules in it: whatever does not depend on
    random numbers is what the constructor makes."""
    first, second = HEADS[kind]().state_dict(), HEADS[kind]().state_dict()
    head = emptied(on_meta(kind))
    for module in head.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    fixed = [key for key in first if torch.equal(first[key], second[key])]
    assert all(torch.equal(head.state_dict()[key], first[key]) for key in fixed)
    assert bool(fixed) != (kind in ("softmax, capped, no bias", "plif"))


class Config(transformers.PreTrainedConfig):  # type: ignore[misc]
    model_type = "head"
    kind = ""


class Model(transformers.PreTrainedModel):  # type: ignore[misc]
    """A user's model with a head, and nothing done for it."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(D)
        self.head = HEADS[config.kind]()
        self.post_init()


@some_heads
def test_from_pretrained(kind: str, tmp_path: Path) -> None:
    model = Model(Config(kind=kind))
    randomise(model.head)
    model.save_pretrained(tmp_path)
    loaded, report = Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    check_equal(loaded.head, model.head)


@some_heads
def test_init_empty_weights_of_accelerate(kind: str) -> None:
    wanted = make(kind)
    with accelerate.init_empty_weights(include_buffers=True):
        head = HEADS[kind]()
    assert all(tensor.is_meta for tensor in head.parameters())
    head = emptied(head)
    head.load_state_dict(wanted.state_dict())
    check_equal(head, wanted)


@some_heads
def test_moves_keep_the_tables(kind: str) -> None:
    """Where nothing moves no table is made again."""
    head = make(kind)
    before = tables(head)
    head.double().float().half().to("cpu").type(torch.float32).share_memory()
    assert all(table is before[name] for name, table in tables(head).items())


@every_head
def test_pickle(kind: str, tmp_path: Any) -> None:
    head = make(kind)
    torch.save(head, tmp_path / "head")
    check_equal(torch.load(tmp_path / "head", weights_only=False), head)


@some_heads
@pytest.mark.parametrize(
    "use",
    [
        lambda head, h, y: head.topk(h, 3),
        lambda head, h, y: head.log_prob(h),
        lambda head, h, y: head.sample(h),
        lambda head, h, y: head.predict(h),
        lambda head, h, y: head(h, y),
    ],
    ids=["topk", "log_prob", "sample", "predict", "loss"],
)
def test_inference_mode_leaves_no_trace(kind: str, use: Callable[..., Any]) -> None:
    """The first use of a head, then gradients as without it."""
    hidden, target = draw(6, D), draw_targets(6)
    grads = []
    for first in (False, True):
        head = make(kind)
        if first:
            with torch.inference_mode():
                use(head, hidden, target)
        values, _ = head.topk(hidden, 3)
        (head(hidden, target).loss + head.log_prob(hidden)[0, 3] + values.sum()).backward()
        grads.append([p.grad.to_dense() for p in head.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert grads[0]


@pytest.mark.parametrize("kind", ["trees", "trees, subset", "softmax"])
def test_made_in_inference_mode(kind: str) -> None:
    """It computes there; in training torch says what is wrong."""
    hidden, target = draw(6, D), draw_targets(6)
    with torch.inference_mode():
        head = make(kind)
        assert torch.equal(head.topk(hidden, 3)[1], make(kind).topk(hidden, 3)[1])
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        head(hidden, target).loss.backward()


@pytest.fixture
def float64_by_default() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@every_head
def test_default_dtype_float64(kind: str, tmp_path: Any, float64_by_default: None) -> None:
    head = randomise(HEADS[kind]())
    assert all(p.dtype == torch.float64 for p in head.parameters())
    assert not any(b.dtype == torch.float32 for b in head.buffers())
    hidden, target = torch.randn(5, D), draw_targets(5)
    output, loss = head(hidden, target)
    log_prob = head.log_prob(hidden)
    assert output.dtype == loss.dtype == log_prob.dtype == torch.float64
    torch.testing.assert_close(
        output, log_prob.gather(1, target[:, None])[:, 0], rtol=1e-12, atol=0
    )
    loss.backward()
    head.save(tmp_path / "head")
    assert torch.equal(load_head(tmp_path / "head").log_prob(hidden), log_prob)


def test_constructors_in_float64(float64_by_default: None) -> None:
    for head in (
        TreeEnsemble.from_counts(D, [5, 3, 2, 1, 1]),
        TreeEnsemble.from_tokens(D, 5, [0, 1, 2, 3, 4, 0, 1], n_trees=2, clusters=3),
        TreeEnsemble.from_vectors(D, torch.randn(5, 3)),
    ):
        assert all(parameter.dtype == torch.float64 for parameter in head.parameters())


@every_head
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        (torch.float32, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_hidden_of_any_dtype(kind: str, weights: torch.dtype, dtype: torch.dtype) -> None:
    """It is cast to the dtype of the weights, by every method; its gradient has its own dtype."""
    head = make(kind, reduction="none").to(weights)
    hidden, target = draw(6, D).to(dtype).requires_grad_(), draw_targets(6)
    cast = hidden.detach().to(weights)
    wide = torch.float64 if weights == torch.float64 else torch.float32
    output, loss = head(hidden, target)
    log_prob, (values, classes) = head.log_prob(hidden), head.topk(hidden, 3)
    assert output.dtype == loss.dtype == log_prob.dtype == values.dtype == wide
    assert torch.equal(loss, head(cast, target).loss)
    assert torch.equal(log_prob, head.log_prob(cast))
    assert torch.equal(values, head.topk(cast, 3)[0])
    assert torch.equal(classes, head.topk(cast, 3)[1])
    assert torch.equal(head.predict(hidden), head.predict(cast))
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(
        head.sample(hidden, generator=seeds[0]), head.sample(cast, generator=seeds[1])
    )
    loss.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == dtype
    assert all(p.grad.dtype == weights for p in head.parameters() if p.grad is not None)


def test_a_call_is_typed() -> None:
    """``head(hidden, target).loss`` is a Tensor to a type checker, as its annotation says."""
    source = inspect.getsource(Head)
    assert "def __call__(self, hidden: Tensor, target: Tensor) -> HeadOutput: ..." in source
    assert get_type_hints(Softmax.forward)["return"] is HeadOutput
    assert get_type_hints(HeadOutput) == {"output": Tensor, "loss": Tensor}


class Uses(nn.Module):
    """One use of a head, for torch.export."""

    def __init__(self, head: Head, name: str) -> None:
        super().__init__()
        self.head, self.name = head, name

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        match self.name:
            case "loss":
                return self.head(hidden, target).loss
            case "topk":
                return self.head.topk(hidden, 3)
            case "every":
                names = USES[self.head.name == "adaptive" :]
                return [Uses(self.head, name)(hidden, target) for name in names]
        return getattr(self.head, self.name)(hidden)


USES = ("loss", "log_prob", "topk", "predict")
QUICK = ("softmax", "trees", "trees, groups")


def exported(module: Uses) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    example = draw(7, D), draw_targets(7)
    return torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's own code
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in HEADS],
)
def test_export(kind: str) -> None:
    """One program for any number of rows, of a head that has not been called before."""
    module = Uses(make(kind), "every")
    program = exported(module).module()
    for rows in (1, 2, 7, 20):
        batch = draw(rows, D), draw_targets(rows)
        torch.testing.assert_close(program(*batch), module(*batch))


def test_export_of_the_adaptive_loss() -> None:
    """torch's module gathers the rows of each cluster: their number depends on the targets."""
    with pytest.raises(Exception, match="data-dependent"):
        exported(Uses(make("adaptive"), "loss"))


COLD = """
import sys, torch
from heads.support import D, draw, draw_targets, make
from heads.test_life import Uses
use, backend, *kinds = sys.argv[1:]
for kind in kinds:
    torch._dynamo.reset()
    head = make(kind)
    module = Uses(head, use)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    leaves = [parameter for parameter in head.parameters() if parameter.requires_grad]
    for rows in (7, 12):
        results = []
        for some in (compiled, module):  # the compiled one first: nothing of the head is warm
            hidden, target = draw(rows, D).requires_grad_(), draw_targets(rows)
            result = some(hidden, target)
            results.append([result])
            if use != "predict":
                value = result[0] if use == "topk" else result
                grads = torch.autograd.grad(value.sum(), [hidden, *leaves], materialize_grads=True)
                results[-1] += grads
        torch.testing.assert_close(*results)
"""


def run_cold(kinds: Iterable[str], use: str, backend: str) -> None:
    folder = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    arguments = [sys.executable, "-W", "ignore", "-c", COLD, use, backend, *kinds]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_cold_compile() -> None:
    """The first call of a process is a compiled one."""
    run_cold(["trees, subset"], "log_prob", "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_cold_compile_of_every_head(use: str) -> None:
    """The first call of every head is a compiled one. A tied head has the code of its kind; predict
    is topk without gradients, which only trees have other code for."""
    kinds = [kind for kind in HEADS if "sparse" not in kind and "tied" not in kind]
    if use == "loss":
        kinds.remove("adaptive")
    if use == "predict":
        kinds = ["softmax", *(kind for kind in kinds if kind.startswith("trees"))]
    run_cold(kinds, use, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trees, subset", "trees, groups", "softmax"])
def test_cold_inductor(kind: str) -> None:
    """Loss and gradients of generated code."""
    run_cold([kind], "loss", "inductor")
