"""The terminal report of an estimate: what it says and in which order is the contract's, how it looks is rich's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.calibration import calibrated_line, threshold_line
from metapeak.reports.data import CATEGORY_NAMES, module_rows
from metapeak.reports.dtypes import dtype_rows
from metapeak.reports.life import print_life
from metapeak.reports.make_it_fit import print_suggestions
from metapeak.reports.pipeline import print_pipeline
from metapeak.reports.ranks import describe_layout, print_ranks
from metapeak.reports.sizes import count, gib, size
from metapeak.tracer.liveness import Category, PhasePeak
from metapeak.tracer.simulation import Fit, Option, RankResult, Simulation, Verdict

_STYLES = {Verdict.FITS: "bold green", Verdict.BORDERLINE: "bold yellow", Verdict.DOES_NOT_FIT: "bold red"}
_LABELS = {Verdict.FITS: "Fits", Verdict.BORDERLINE: "Borderline on", Verdict.DOES_NOT_FIT: "Does not fit"}

# Attention operators by what people call them.
_ATTENTION_OPS = {
    "_scaled_dot_product_flash_attention": "flash attention",
    "_flash_attention_forward": "flash attention 2",
    "_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN attention",
}

LARGEST_SHOWN = 8
MODULES_SHOWN = 12
DTYPES_SHOWN = 0.001  # of a row's bytes; what is less is in the JSON
# Below this many columns the tables leave out what can be missed first.
NARROW = 100


def print_summary(simulation: Simulation, console: Console, *, chart: bool = False) -> None:
    """Print the report of one estimate, with a chart of live bytes if asked."""
    rank = simulation.worst
    print_head(simulation, rank, console)
    _verdict(simulation, rank, console)
    _peak(rank, console)
    _calibrated(simulation, rank, console)
    print_ranks(simulation, console)
    _verified(simulation, console)
    print_pipeline(simulation, console)
    if chart:
        from metapeak.reports.timeline import print_timeline

        print_timeline(rank, console)
    _phases(rank, console)
    print_life(simulation, console)
    _largest(rank, console)
    _modules(rank, console)
    _dtypes(simulation, console)
    print_suggestions(simulation.suggestions, console)
    print_sentences("Assumed", simulation.how.assumptions, console)
    print_sentences("Not modelled", simulation.how.not_modelled, console)


def _verified(simulation: Simulation, console: Console) -> None:
    """A line a rank: what the rewrite of the unsharded step came to beside the traced one, or where they part."""
    for one in simulation.verified or ():
        peaks = [max(phase[f"{which}_peak_bytes"] for phase in one["phases"]) for which in ("traced", "rewritten")]
        text = (
            f"Verified, rank {one['rank']}: fully_shard traced {peaks[0]:,} bytes, the unsharded step rewritten "
            f"{peaks[1]:,} bytes at their peaks; "
        )
        differing = [
            f"{phase['phase']} of {phase['iteration']}"
            for phase in one["phases"]
            if any(phase[f"traced_{what}_bytes"] != phase[f"rewritten_{what}_bytes"] for what in ("peak", "end"))
        ]
        equal = (
            f"equal in all {len(one['phases'])} phases" if one["equal"] else f"they differ in {', '.join(differing)}"
        )
        console.print(Text(text + equal + ".", style="" if one["equal"] else "yellow"))


def verdict_style(verdict: Verdict) -> str:
    """The style of a verdict's words."""
    return _STYLES[verdict]


def print_head(simulation: Simulation, rank: RankResult, console: Console) -> None:
    model, how = simulation.model, simulation.how
    trainable = f", {model.trainable_parameters:,} of them trained"
    trained = trainable if model.trainable_parameters != model.parameters else ""
    ours = sum(seconds for stage, seconds in how.seconds.items() if stage != "import")
    console.print(
        Text.assemble(
            (model.id, "bold"),
            f"   {describe_step(simulation, rank)}   ",
            (f"traced, {ours:.1f} s{', from the cache' if how.cached else ''}", "dim"),
        )
    )
    console.print(
        Text(
            f"{model.architecture}, {count(model.parameters)} parameters ({model.parameters:,}{trained}), "
            f"from {model.source}"
        )
    )


def describe_step(simulation: Simulation, rank: RankResult) -> str:
    """One line: what is trained, in which precision, with which optimizer, on which batch."""
    options = {name: option.value for name, option in simulation.options.items()}
    parts = [describe_method(simulation), str(options.get("weights_dtype", ""))]
    if options.get("autocast"):
        parts[1] += f" weights, {options['autocast']} autocast"
    masters = " on fp32 masters" if options.get("master_weights") else ""
    parts.append(f"{options.get('optimizer', 'adamw')} {options.get('implementation') or ''}".rstrip() + masters)
    lengths = [options.get(name) for name in ("seq_len", "target_len") if options.get(name)]
    batch = f"batch {options.get('batch_size', 1)}"
    pieces = options.get("microbatches") or options.get("grad_accum") or 1
    if pieces > 1:
        batch = f"{pieces} x {batch}"
    if options.get("batch_size", 1) is None:
        batch = "its own batch"
    elif lengths:
        batch += " x " + " + ".join(str(length) for length in lengths)
    elif options.get("image_size"):
        batch += f" x {options['image_size']} pixels"
    parts.append(batch)
    parts.append(describe_layout(simulation))
    policy = options.get("checkpointing", "none")
    parts.append("no checkpointing" if policy == "none" else f"checkpointing {policy}")
    parts.append(attention_kernels(rank) or f"{options.get('attention') or 'no'} attention")
    return ", ".join(part for part in parts if part)


def describe_method(simulation: Simulation) -> str:
    """What is trained: LoRA r16 on q_proj, v_proj (PEFT's default for llama)."""
    options, model = simulation.options, simulation.model
    method = options["method"].value if "method" in options else None
    if method in ("lora", "qlora"):
        base = options["quantization"].value if "quantization" in options else None
        return _describe_lora(options) + (f", on a {base} base" if base not in (None, "none") else "")
    if method == "frozen-base":
        return f"frozen base, {', '.join(options['trainable'].value)} trained"
    return "full fine-tune" if model.trainable_parameters == model.parameters else "partly frozen"


def _describe_lora(options: Mapping[str, Option]) -> str:
    kinds = [name for name, option in (("DoRA", "lora_dora"), ("rsLoRA", "lora_rslora")) if options[option].value]
    targets = options["lora_targets"]
    parameters = options["lora_target_parameters"].value if "lora_target_parameters" in options else ()
    names = [targets.value] if isinstance(targets.value, str) else [*(targets.value or ()), *(parameters or ())]
    default = f" ({targets.origin})" if targets.origin.startswith("PEFT") else ""
    text = f"{' '.join(kinds) or 'LoRA'} r{options['lora_rank'].value} on {', '.join(names)}{default}"
    saved = options["lora_modules_to_save"].value
    return text + (f" with {', '.join(saved)} trained whole" if saved else "")


def attention_kernels(rank: RankResult) -> str:
    """The fused attention kernels that the step ran, or an empty string."""
    found = {
        label: None
        for name in rank.liveness.op_names
        for op, label in _ATTENTION_OPS.items()
        if name.split(".")[1:2] == [op]
    }
    return " and ".join(found)


def _verdict(simulation: Simulation, rank: RankResult, console: Console) -> None:
    fit = simulation.fit
    if fit is None:
        low, high = rank.device_range
        needs = f"{gib(rank.device_bytes)} GiB"
        console.print(Text.assemble(("Needs ", "bold"), (needs, "bold"), f" of a GPU ({gib(low)} to {gib(high)})"))
        return
    console.print(verdict_line(fit, rank.device_bytes))


def verdict_line(fit: Fit, needs_bytes: int) -> Text:
    """Whether `needs_bytes` of device memory fit, how much is left or missing."""
    low, high = fit.device_range
    usable = f"usable {gib(fit.gpu.usable_bytes)} GiB ({fit.gpu.usable_from})"
    rest = f"{gib(abs(fit.headroom_bytes))} GiB " + ("left" if fit.headroom_bytes >= 0 else "too much")
    return Text.assemble(
        (f"{_LABELS[fit.verdict]} {fit.gpu.id}", _STYLES[fit.verdict]),
        f": needs {gib(needs_bytes)} GiB ({gib(low)} to {gib(high)}), {usable}, {rest}",
    )


def _peak(rank: RankResult, console: Console) -> None:
    at = rank.peak_at
    where = f" in {at.module}" if at.module else ""
    recompute = ", recompute" if at.recompute else ""
    console.print(
        Text.assemble(
            ("Peak", "bold"),
            f" at iteration {at.iteration}, {at.phase}{recompute}, ",
            (at.op, "cyan"),
            f"{where}, in GiB:",
        )
    )
    breakdown = rank.breakdown
    parts = [
        f"{CATEGORY_NAMES[category].replace('_', ' ')} {gib(nbytes)}"
        for category, nbytes in breakdown.items()
        if nbytes or category <= Category.ACTIVATION
    ]
    console.print(Text("  " + "   ".join(parts)))
    console.print(
        Text(
            f"  live {gib(rank.requested_bytes)} -> allocated {gib(rank.allocated_bytes)} -> "
            f"reserved {gib(rank.reserved_bytes)} ({_reserved_words(rank)}) "
            f"-> device {gib(rank.device_bytes)}\n  (traced, derived, derived, {_overheads(rank)})"
        )
    )


def _calibrated(simulation: Simulation, rank: RankResult, console: Console) -> None:
    console.print(Text(calibrated_line(rank), style="dim"))
    below = threshold_line(simulation.fit) if simulation.fit is not None else None
    if below is not None:
        console.print(Text(below, style="dim"))


def _reserved_words(rank: RankResult) -> str:
    unfragmented = f"{gib(rank.reservation.unfragmented_peak)} without fragmentation"
    return f"{rank.allocator.text}; {unfragmented}" if rank.allocator.text else unfragmented


def _overheads(rank: RankResult) -> str:
    """What the driver shows beside segments: `assumed: CUDA context 0.24 to 0.44, libraries 0 to 0.24`."""
    by_tag: dict[str, list[str]] = {}
    for item in rank.overheads.items:
        name = item.name.replace("_", " ").replace("cuda", "CUDA")
        by_tag.setdefault(item.tag, []).append(f"{name} {gib(item.low_bytes)} to {gib(item.high_bytes)}")
    return "; ".join(f"{tag}: {', '.join(parts)}" for tag, parts in by_tag.items()) or "no overheads counted"


def _phases(rank: RankResult, console: Console) -> None:
    phases, at = _merged(rank.phases) if rank.actions else rank.phases, rank.peak_at
    # With gradient accumulation an iteration has several forwards and backwards.
    same = [phase for phase in phases if (phase.iteration, phase.phase) == (at.iteration, at.phase)]
    at_peak = max(same, key=lambda phase: phase.peak_bytes)
    table = Table(title="Phases, GiB (traced storages)", title_justify="left", box=None, pad_edge=False)
    table.add_column("iteration", justify="right")
    table.add_column("phase")
    table.add_column("peak", justify="right")
    table.add_column("at its end", justify="right")
    table.add_column("")
    for phase in phases:
        table.add_row(
            str(phase.iteration) if phase.iteration else "",
            phase.phase,
            gib(phase.peak_bytes),
            gib(phase.end_bytes),
            "<- peak" if phase is at_peak else "",
        )
    console.print()
    console.print(table)
    console.print(Text(f"The peak is in {at.phase}. Between steps: {gib(rank.steady_bytes)} GiB"))
    host = [
        f"{phase} {gib(row['host_bytes'])}" + (" pinned" if row["pinned_bytes"] == row["host_bytes"] else "")
        for phase, row in rank.host.items()
    ]
    if host:
        console.print(Text(f"On the host, GiB: {', '.join(host)}"))


def _merged(phases: list[PhasePeak]) -> list[PhasePeak]:
    """A row a phase of each iteration: in a pipeline forwards and backwards of many microbatches alternate."""
    merged: dict[tuple[int, str], PhasePeak] = {}
    for phase in phases:
        key = (phase.iteration, phase.phase)
        peak = max(phase.peak_bytes, merged[key].peak_bytes if key in merged else 0)
        merged[key] = replace(phase, peak_bytes=peak)
    return list(merged.values())


def _largest(rank: RankResult, console: Console) -> None:
    table = Table(title="Largest alive at the peak", title_justify="left", box=None, pad_edge=False)
    narrow = console.width < NARROW
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("category", no_wrap=True)
    table.add_column("module", overflow="fold")
    if not narrow:
        table.add_column("shape", no_wrap=True)
        table.add_column("dtype", no_wrap=True)
        table.add_column("made in", overflow="fold")
    for tensor in rank.largest(LARGEST_SHOWN):
        row = [size(tensor.nbytes), tensor.category.replace("_", " "), tensor.module]
        if not narrow:
            shape = " x ".join(str(extent) for extent in tensor.shape) or "scalar"
            made = f"{tensor.born_phase}{' of ' + str(tensor.born_iteration) if tensor.born_iteration else ''}"
            made += f", {tensor.source_line}" if tensor.source_line else ""
            row += [shape, tensor.dtype, made]
        table.add_row(*row)
    console.print()
    console.print(table)


def _modules(rank: RankResult, console: Console) -> None:
    rows = sorted(module_rows(rank), key=lambda row: -row["bytes"])
    shown, rest = rows[:MODULES_SHOWN], rows[MODULES_SHOWN:]
    columns = [name for name in CATEGORY_NAMES.values() if any(row.get(name) for row in shown)]
    if console.width < NARROW:
        columns = []
    table = Table(title="By module at the peak, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("module", overflow="fold")
    table.add_column("total", justify="right", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for row in shown:
        name = row["module"] or "(the model itself)"
        name += f" x {row['count']}" if row["count"] > 1 else ""
        table.add_row(name, gib(row["bytes"]), *(gib(row[column]) if row.get(column) else "" for column in columns))
    if rest:
        table.add_row(f"{len(rest)} more", gib(sum(row["bytes"] for row in rest)), *[""] * len(columns))
    console.print()
    console.print(table)


def _dtypes(simulation: Simulation, console: Console) -> None:
    table = Table(title="Dtypes", title_justify="left", box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("dtype, GiB", overflow="fold")
    table.add_column("from", overflow="fold")
    for row in dtype_rows(simulation):
        share = DTYPES_SHOWN * sum(nbytes or 0 for nbytes in row["bytes"].values())
        shown = {dtype: nbytes for dtype, nbytes in row["bytes"].items() if nbytes is None or nbytes >= share}
        dtypes = [dtype if nbytes is None else f"{dtype} {gib(nbytes)}" for dtype, nbytes in shown.items()]
        table.add_row(row["what"], ", ".join(dtypes), row["from"])
    console.print()
    console.print(table)


def print_sentences(title: str, sentences: Iterable[str], console: Console) -> None:
    sentences = [sentence.rstrip(".") for sentence in sentences]
    if sentences:
        console.print()
        console.print(Text.assemble((f"{title}: ", "bold"), "; ".join(sentences) + "."))
