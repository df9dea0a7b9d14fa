"""The recorded graph: what it says of a step that can be followed by hand, and that nothing is lost on the way."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import networkx
import pytest
import torch

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import LOAD
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.trace_file import load_graph, save_graph


class Net(torch.nn.Module):
    """Two linear layers that share one weight of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        hidden = self.first(x).relu()
        return (self.second(hidden) * self.scale).sum()


def record(iterations=2):
    with torch.device("meta"):
        model = Net()
    return record_training_step(
        model,
        (torch.ones(4, 8),),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        iterations=iterations,
    )[0]


@pytest.fixture(scope="module")
def graph():
    return record()


def storages(graph, category):
    return [graph.nbytes[row] for row, kind in enumerate(graph.category) if kind == category]


def test_what_is_there_before_the_step(graph):
    assert storages(graph, Category.PARAMETER) == [8 * 8 * 4]  # tied: one storage
    assert storages(graph, Category.BUFFER) == [8 * 4]
    assert storages(graph, Category.INPUT) == [4 * 8 * 4]
    assert set(graph.load_names.values()) == {"first.weight", "second.weight", "scale", "batch.0"}


def test_gradients_and_states(graph):
    assert storages(graph, Category.GRADIENT) == [256, 256]  # one an iteration, freed by zero_grad
    assert storages(graph, Category.OPTIMIZER_STATE) == [256]  # momentum, made once
    owners = {
        graph.module_names[graph.owner[row]]
        for row, kind in enumerate(graph.category)
        if kind in (Category.GRADIENT, Category.OPTIMIZER_STATE)
    }
    assert owners == {"first"}


def test_views_are_free(graph):
    views = [node for node in range(graph.num_ops) if graph.op_names[graph.op[node]] == "aten.t.default"]
    assert views
    assert not set(views) & set(graph.birth)


def test_operations_know_where_they_come_from(graph):
    products = [node for node in range(graph.num_ops) if graph.op_names[graph.op[node]] == "aten.mm.default"]
    first_iteration = [node for node in products if graph.iteration[node] == 1]
    where = [(Phase(graph.phase[node]).label, graph.module_names[graph.module[node]]) for node in first_iteration]
    # forward of both layers; backward of the second (weight and input), then of the first (weight: x needs none)
    assert [module for phase, module in where if phase == "forward"] == ["first", "second"]
    assert [module for phase, module in where if phase == "backward"] == ["second", "second", "first"]
    relu = next(node for node in range(graph.num_ops) if graph.op_names[graph.op[node]] == "aten.relu.default")
    file, line = graph.source_names[graph.source[relu]].rsplit(":", 1)
    assert file.endswith("test_graph.py")
    assert ".relu()" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_saved_activations(graph):
    first_forward = [
        (graph.nbytes[row], graph.op_names[graph.op[birth]])
        for row, birth in enumerate(graph.birth)
        if graph.category[row] == Category.ACTIVATION and graph.iteration[birth] == 1
    ]
    # relu's output is saved; mm's output dies at once (relu saves its result); the second mm's output is needed by no
    # one but `mul` saves neither it (scale needs no gradient); the loss outlives the forward.
    assert first_forward == [(128, "aten.relu.default"), (4, "aten.sum.default")]


def test_lints_and_round_trips(graph, tmp_path):
    graph.lint()
    save_graph(graph, tmp_path / "step.json.gz")
    loaded = load_graph(tmp_path / "step.json.gz")
    for column in dataclasses.fields(graph):
        assert getattr(loaded, column.name) == getattr(graph, column.name), column.name
    assert str(loaded) == str(graph)
    assert str(loaded.fx_graph()) == str(graph.fx_graph())
    loaded.lint()


def test_a_decoupled_trace_round_trips(tmp_path):
    with torch.device("meta"):
        model = Net()
    saved = record_training_step(model, (torch.ones(4, 8),), None, iterations=1, decouple_saves=True)[0]
    save_graph(saved, tmp_path / "step.json.gz")
    loaded = load_graph(tmp_path / "step.json.gz")
    for column in dataclasses.fields(saved.saved):
        assert getattr(loaded.saved, column.name) == getattr(saved.saved, column.name), column.name


def test_fx_graph_is_the_step(graph):
    fx = graph.fx_graph()
    fx.lint()
    calls = [node for node in fx.nodes if node.op == "call_function" and not str(node.target).startswith("<built-in")]
    assert [str(node.target) for node in calls] == [
        graph.op_names[graph.op[node]] for node in range(graph.num_ops) if graph.op_names[graph.op[node]] != LOAD
    ]
    assert [node.name for node in fx.nodes if node.op == "placeholder"] == [
        "first_weight",
        "second_weight",
        "scale",
        "batch_0",
    ]
    relu = next(node for node in calls if "relu" in str(node.target))
    assert relu.meta["phase"] == "forward" and relu.meta["module"] == ""
    assert relu.meta["tensors"][0][:2] == ((4, 8), "float32")
    assert "torch.ops.aten.relu.default" in str(torch.fx.GraphModule({}, fx).code)


def test_networkx(graph):
    digraph = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(digraph)
    assert sum(nbytes for _, nbytes in digraph.nodes(data="allocated_bytes")) == sum(graph.nbytes)
    relu = next(node for node, op in digraph.nodes(data="op") if op == "aten.relu.default")
    assert [digraph.nodes[node]["op"] for node in digraph.predecessors(relu)] == ["aten.mm.default"]


def test_lint_finds_a_read_before_birth(graph):
    broken = record(iterations=1)
    product = next(node for node in range(broken.num_ops) if broken.op_names[broken.op[node]] == "aten.mm.default")
    storage = broken.value_storage[next(iter(broken.args[product]))]
    broken.death[storage] = product
    with pytest.raises(ValueError, match="not alive"):
        broken.lint()


def test_a_file_that_holds_no_trace(tmp_path):
    path = tmp_path / "other.gz"
    path.write_text("{}")
    with pytest.raises(InputError, match="Cannot read a trace"):
        load_graph(path)
    with pytest.raises(InputError, match="Cannot read a trace"):
        load_graph(tmp_path / "missing")


def test_nothing_after_the_trace_imports_torch(graph, tmp_path):
    save_graph(graph, tmp_path / "step.json.gz")
    program = """
import json, sys
from metapeak.tracer import Simulation
from metapeak.tracer.kernels import Device, KernelWorkspaces
from metapeak.tracer.simulation import How, ModelSummary, RankResult
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.trace_file import load_graph
from metapeak.reports.data import record_of
from metapeak.reports.summary import print_summary
from rich.console import Console
graph = load_graph(sys.argv[1])
liveness = KernelWorkspaces.of(graph, Device()).added_to(graph.liveness())
rank = RankResult(rank=0, count=1, coordinates={}, liveness=liveness)
simulation = Simulation(
    model=ModelSummary(id="x", source="test", architecture="Net", parameters=64, trainable_parameters=64,
                       parameter_bytes=256),
    options={}, how=How(torch="", transformers="", seconds={}, assumptions=(), not_modelled=()), ranks=(rank,),
    fit=rank.fit_on(find_gpu("t4")))
print_summary(simulation, Console(file=sys.stderr))
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")]
json.dump(record_of(simulation), sys.stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "step.json.gz")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["ranks"][0]["breakdown"]["parameters"] == 256
