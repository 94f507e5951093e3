"""Reads an adapter by PEFT: python merged_by_peft.py FOLDER OUT. Writes PEFT's own copy of it and the merged weights.

A process of its own, so that no test imports torch. The base has a linear layer of zeros at each entry of the file.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file

PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"


class Node(torch.nn.Module):
    """Holds others; never run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def base_of(folder: Path) -> Node:
    arrays, root = load_file(folder / "adapter_model.safetensors"), Node()
    for name, a in arrays.items():
        if not name.endswith(SUFFIX):
            continue
        *path, last = name.removeprefix(PREFIX).removesuffix(SUFFIX).split(".")
        node = root
        for part in path:
            if part not in dict(node.named_children()):
                node.add_module(part, Node())
            node = node.get_submodule(part)
        linear = torch.nn.Linear(a.shape[1], len(arrays[name.replace("lora_A", "lora_B")]), bias=False)
        torch.nn.init.zeros_(linear.weight)
        node.add_module(last, linear)
    return root


if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    model = PeftModel.from_pretrained(base_of(folder), folder)
    model.save_pretrained(out / "again")
    merged = model.merge_and_unload().named_parameters()
    save_file({name: weight.detach().numpy() for name, weight in merged}, out / "merged.safetensors")
