"""Sections of docs/results.md on what models are adapted to: protein families, and text whose domain changes."""

from experiments.benchmark._markdown import Figures, Folder, count, percent, prose, spread, table


def families(folder: Folder) -> str:
    """Fine-tuning on superfamilies of SCOPe against what needs no pretraining."""
    files = [found for name, found in folder.items() if name.startswith("families_")]
    rows = [
        (
            *(str(run["seed"]), run["model"], percent(run["accuracy"])),
            *(f"{run['mcc']:.3f}", f"{run['f1']:.3f}", f"{run['seconds']:.0f}"),
        )
        for found in files
        for run in found["runs"]
    ]
    records, settings = files[0]["records"], files[0]["settings"]
    said = prose(
        f"{count(records['domains'])} protein domains of at most {settings['longest']} residues in "
        f"{records['classes']} superfamilies with at least {settings['members']} members (SCOPe 2.07 at 40 % identity; "
        "Fox, Brenner and Chandonia 2014); a seed picks the split, and figures are of its test tenth. `nearest` and "
        "`regression` read k-mers, `bytes` is `finetuned` without a base. Three seeds shared a GPU with another run."
    )
    return f"{said}\n\n{table(('seed', 'model', 'accuracy', 'MCC', 'F1', 'seconds with compilation'), rows)}"


def mixes(folder: Folder) -> str:
    """Adapters of a frozen model on text whose domain changes."""
    of_mixes = {name: found for name, found in folder.items() if found.get("benchmark") == "routed_lora"}
    return "\n\n".join(_mix(name, found) for name, found in of_mixes.items())


def _mix(name: str, found: Figures) -> str:
    less, closed = (found["compared"].get(key, {}) for key in ("less_than_static", "gap_closed"))
    answers = ("accuracy",) if "accuracy" in found["arms"]["static"] else ()
    rows = [
        (
            *(arm, count(of["parameters"]), f"{_bits(of):.3f}", *(percent(of[key]) for key in answers)),
            ", ".join(f"{seed['bits_per_byte']:.3f}" for seed in of["seeds"]),
            *(("", "") if arm == "static" else (_interval(less[arm]), _rare(less[arm]))),
            _interval(closed[arm]) if arm in closed else "",
        )
        for arm, of in found["arms"].items()
    ]
    settings, seeds, run = found["settings"], len(found["arms"]["static"]["seeds"]), found["base"]
    steps = settings.get("steps")
    length = f"{steps} steps" if steps else f"{settings['seconds']:.0f} s"
    told = (
        f"`oracle` is told the domain and has rank {settings['rank']} for each, `static` as many parameters in one "
        "adapter. Routers of arms that imitate learn from the domains' numbers. "
    )
    said = prose(
        f"`{name}`, {seeds} seed{'s' * (seeds > 1)}: {_domains(found)} Each adapter of the frozen `{run['run']}` "
        f"({_base(run)}) trained for {length} beside other runs. "
        f"{told if 'oracle' in found['arms'] else ''}Bits less than `static` are means over seeds, paired over "
        "documents, with 95 % intervals (BCa) that do not count what seeds differ by; below 0 an arm is worse. q is of "
        "Wilcoxon's test over all arms and the base (Benjamini and Hochberg)."
    )
    compared = ("by seed", "less than `static`", "q", "share of the oracle's gain")
    head = ("arm", "trained parameters", "bits per byte", *answers, *compared)
    return f"{said}\n\n{table(head, rows)}\n\n{_parts(found)}"


def _parts(found: Figures) -> str:
    """Bits by domain, unless domains are ciphers of one text, and by the bytes since a change, means over seeds."""
    arms = {"base": [found["base"]]} | {arm: of["seeds"] for arm, of in found["arms"].items()}
    domains = found["domains"] if found["mix"] == "natural" else []
    distances = [d for d, bits in found["base"]["by_distance"].items() if bits is not None]
    wanted = [*(("by_domain", name) for name in domains), *(("by_distance", name) for name in distances)]
    rows = [
        (arm, *(f"{sum(run[by][name] for run in runs) / len(runs):.3f}" for by, name in wanted))
        for arm, runs in arms.items()
    ]
    head = ("bits per byte", *domains, *(f"{name} bytes since a change" for name in distances))
    return table(head, rows) if distances else ""


def _rare(found: Figures) -> str:
    return f"{found['q']:.2g}" if "q" in found else ""


def _base(run: Figures) -> str:
    """The base by itself, with what its patcher makes of the mix."""
    patches = ""
    if "overflow" in run:
        bytes_each, overflow = run["bytes_per_patch"], 100 * run["overflow"]
        patches = f", in patches of {bytes_each:.1f} bytes; {overflow:.2f} % of boundaries found no slot"
    return f"{run['bits_per_byte']:.3f} bits by itself{patches}"


def _domains(found: Figures) -> str:
    settings, domains = found["settings"], found["domains"]
    if found["mix"] == "conflict":
        letters = settings.get("letters") or 26
        text = f"books under {len(domains)} permutations of {letters} letters, which change unmarked"
    elif found["mix"] == "natural":
        spans = " to ".join(map(count, settings["spans"]))
        text = f"{', '.join(domains)}, in spans of {spans} bytes, which change unmarked"
    else:
        return f"film reviews that end in their label, in rows of {count(settings['length'])} bytes."
    return f"{text} inside rows of {count(settings['length'])} bytes."


def speed(folder: Folder) -> str:
    """What adapters add to forward passes and decoding."""
    found = folder["adapter_speed"]
    setting, ratios = found["setting"], found["compared"]
    shapes = [f"{rows} x {count(length)}" for rows, length in setting["shapes"]]
    decoded = [f"decoding, {rows} row{'s' * (rows > 1)}" for rows in setting["rows"]]
    times = [
        (
            name,
            count(arm["parameters"]),
            *(f"{ratio:.2f}" for ratio in ratios[name]["forward_over_none"]),
            *(percent(share) for share in ratios[name]["decoding_over_none"]),
        )
        for name, arm in found["arms"].items()
    ]
    memory = [
        (
            name,
            _megabytes(arm["forward"][0]["argument_bytes"]),
            *(_megabytes(timed["temporary_bytes"]) for timed in arm["forward"]),
            *(_megabytes(timed["write"]["temporary_bytes"]) for timed in arm["decoding"]),
        )
        for name, arm in found["arms"].items()
    ]
    said = prose(
        f"A byte Transformer of width {setting['dim']} with {setting['layers']} layers, ranks of {setting['rank']}: "
        "times of forward passes over those without an adapter, and bytes a second of decoding as a share."
    )
    held = (
        "Memory as the compiler plans it, in MB: parameters, and what a program needs besides its arguments."
    )
    columns = (*shapes, *decoded)
    parts = (
        *(said, table(("adapter", "trained parameters", *columns), times)),
        *(held, table(("adapter", "parameters", *columns), memory)),
        _train_steps(folder),
    )
    return "\n\n".join(parts)


def _train_steps(folder: Folder) -> str:
    """What a train step takes with an adapter, and the router's share of it."""
    head = ("file", "adapter", "ms (95 %)", "over full fine-tuning", "router and its code")
    rows = [
        (
            *(f"`{name}`", arm, spread(timed["step"]), f"{found['compared'][arm]['step_over_full']:.2f}"),
            percent(share) if (share := found["compared"][arm].get("router_of_step")) else "",
        )
        for name, found in folder.items()
        if found.get("benchmark") == "adapter_speed"
        for arm, timed in found["arms"].items()
        if "step" in timed
    ]
    return f"A train step of the same model:\n\n{table(head, rows)}"


def searches(folder: Folder) -> str:
    """What a router's exact search takes on a CPU."""
    found = folder["index_search"]
    rows = [
        (
            *(count(at["chunks"]), spread(at)),
            *(_megabytes(at[f"{kind}_bytes"]) for kind in ("argument", "temporary")),
        )
        for at in found["searches"]
    ]
    said = prose(
        f"The {found['neighbours']} nearest of an index's chunks for {found['queries']} queries of width "
        f"{found['dim']}, exactly, in fp32: a row has a query a chunk. The CPU was shared with other work."
    )
    return f"{said}\n\n{table(('chunks', 'ms', 'index, MB', 'besides, MB'), rows)}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


def _bits(arm: Figures) -> float:
    return sum(seed["bits_per_byte"] for seed in arm["seeds"]) / len(arm["seeds"])


def _interval(value: Figures) -> str:
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"
