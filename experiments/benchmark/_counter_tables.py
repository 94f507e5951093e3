"""The section of docs/results.md on what the GPU counted in kernels."""

from experiments.benchmark._markdown import Figures, Folder, ms, prose, table

UNITS = ("dram", "l2", "l1", "tensor_cores", "alu", "warps")


def kernels(folder: Folder) -> str:
    """Each kernel that takes a hundredth of its program or more."""
    text = []
    for name, found in folder.items():
        if found.get("benchmark") != "counters":
            continue
        rows = [
            row(program, kernel)
            for program, of in found["programs"].items()
            for program, kernel in zip([program, *[""] * len(of["kernels"])], of["kernels"], strict=False)
        ]
        head = (
            "program",
            "kernel",
            "ms",
            "DRAM",
            "L2",
            "L1",
            "tensor cores",
            "ALU",
            "warps",
            "registers",
            "waits",
        )
        said = prose(
            f"`{name}`, by Nsight Compute on one {found['devices']['kind']}: per cent of what each unit can do, of "
            "warps of what a multiprocessor holds, and what a warp waits for most often (waits for each instruction "
            "that is issued). Caches are cleared before each kernel, and XLA chose its own kernels without timing "
            "them, so times are not those of a benchmark."
        )
        text.append(f"{said}\n\n{table(head, rows)}")
    return "\n\n".join(text)


def row(program: str, kernel: Figures) -> tuple[str, ...]:
    """One kernel; `program` is "" except for its first."""
    waits = ", ".join(f"{wait.replace('_', ' ')} {count:.1f}" for wait, count in kernel["waits"].items())
    return (
        f"`{program}`" if program else "",
        f"`{kernel['name']}`",
        ms(kernel["seconds"]),
        *(f"{kernel['percent'][unit]:.0f}" for unit in UNITS),
        f"{kernel['registers']:.0f}",
        waits,
    )
