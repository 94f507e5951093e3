"""Short names under which configs are stored, so that renaming or moving a class leaves every run readable."""

NAMES = {
    "recipe": "jaxblt.training.recipe:Recipe",
    "train": "jaxblt.training.recipe:TrainConfig",
    "reference": "jaxblt.training.reference:ReferenceConfig",
    "hybrid": "jaxblt.training.hybrid:HybridConfig",
    "policy": "jaxblt.training.policy:PolicyConfig",
    "adamw": "jaxblt.training.optimizer:AdamWConfig",
    "lion": "jaxblt.training.optimizers:LionConfig",
    "adafactor": "jaxblt.training.optimizers:AdafactorConfig",
    "muon": "jaxblt.training.optimizers:MuonConfig",
    "next_byte": "jaxblt.training.objectives:NextByte",
    "masked": "jaxblt.training.objectives:Masked",
    "span": "jaxblt.training.objectives:Span",
    "classify": "jaxblt.training.objectives:Classify",
    "classify_positions": "jaxblt.training.objectives:ClassifyPositions",
    "classify_chain": "jaxblt.training.objectives:ClassifyChain",
    "regress": "jaxblt.training.objectives:Regress",
    "multi_task": "jaxblt.training.objectives:MultiTask",
    "task_loss": "jaxblt.training.objectives:TaskLoss",
    "order_agnostic": "jaxblt.training.objectives:OrderAgnostic",
    "data": "jaxblt.data.config:DataConfig",
    "source": "jaxblt.data.mixture:SourceConfig",
    "labelled_data": "jaxblt.data.labelled:LabelledDataConfig",
    "label_task": "jaxblt.data.label_tasks:LabelTask",
    "task_data": "jaxblt.data.task_data:TaskDataConfig",
    "mqar": "jaxblt.evaluation.tasks.recall:MQAR",
    "gap_recall": "jaxblt.evaluation.tasks.gap_recall:GapRecall",
    "copy": "jaxblt.evaluation.tasks.copying:Copy",
    "repeat_copy": "jaxblt.evaluation.tasks.copying:RepeatCopy",
    "pattern_matching": "jaxblt.evaluation.tasks.matching:PatternMatching",
    "parity": "jaxblt.evaluation.tasks.parity:Parity",
    "listops": "jaxblt.evaluation.tasks.listops:ListOps",
    "listops_files": "jaxblt.evaluation.tasks.listops_files:ListOpsFiles",
    "babi": "jaxblt.evaluation.tasks.babi:Babi",
    "babilong": "jaxblt.evaluation.tasks.babilong:Babilong",
    "text_labels": "jaxblt.evaluation.tasks.reviews:TextLabels",
    "text_pairs": "jaxblt.evaluation.tasks.pairs:TextPairs",
    "mesh": "jaxblt.parallel.mesh:MeshConfig",
    "patcher": "jaxblt.patching.config:PatcherConfig",
    "blt": "jaxblt.models.blt:BLTConfig",
    "byte_classifier": "jaxblt.models.classifier:ByteClassifierConfig",
    "labeller": "jaxblt.models.labeller:LabellerConfig",
    "label_head": "jaxblt.models.label_head:LabelHeadConfig",
    "task_head": "jaxblt.models.task_heads:TaskHead",
    "task_heads": "jaxblt.models.task_heads:TaskHeadsConfig",
    "byte_lm": "jaxblt.models.byte_lm:ByteLMConfig",
    "stack": "jaxblt.models.stack:StackConfig",
    "adapter": "jaxblt.adapters.config:AdapterConfig",
    "router": "jaxblt.adapters.config:RouterConfig",
    "retrieval": "jaxblt.adapters.retrieval.config:RetrievalConfig",
    "mixed_levels": "jaxblt.adapters.levels:Mixed",
    "adapter_losses": "jaxblt.adapters.losses:AdapterLosses",
    "governor": "jaxblt.adapters.governor:Governor",
    "clamp": "jaxblt.adapters.transforms:Clamp",
    "confidence": "jaxblt.adapters.transforms:Confidence",
    "ema": "jaxblt.adapters.transforms:Ema",
    "sparse": "jaxblt.adapters.transforms:Sparse",
    "draw": "jaxblt.adapters.draw:Draw",
    "sticky": "jaxblt.adapters.sticky:Sticky",
    "top_k": "jaxblt.adapters.transforms:TopK",
    "embedding": "jaxblt.models.embeddings:EmbeddingConfig",
    "hash": "jaxblt.models.embeddings:HashConfig",
    "positions": "jaxblt.models.positions:PositionConfig",
    "hyena": "jaxblt.mixers.hyena:HyenaConfig",
    "attention": "jaxblt.mixers.attention:AttentionConfig",
    "recurrence": "jaxblt.mixers.recurrence:GatedRecurrenceConfig",
    "gru": "jaxblt.mixers.cells:GRUConfig",
    "lstm": "jaxblt.mixers.cells:LSTMConfig",
    "ntm": "jaxblt.mixers.ntm:NTMConfig",
    "gated_delta_net": "jaxblt.mixers.gated_delta_net:GatedDeltaNetConfig",
    "gated_linear_attention": "jaxblt.mixers.gated_linear_attention:GatedLinearAttentionConfig",
    "mamba2": "jaxblt.mixers.mamba2:Mamba2Config",
    "state_engine": "jaxblt.mixers.state_engine:StateEngineConfig",
    "neural_memory": "jaxblt.mixers.neural_memory:NeuralMemoryConfig",
    "mac": "jaxblt.mixers.memory_context:MACConfig",
    "mag": "jaxblt.mixers.gated_memory:MAGConfig",
    "slot_memory": "jaxblt.mixers.slot_memory:SlotMemoryConfig",
    "dual_decay": "jaxblt.mixers.dual_decay:DualDecayConfig",
    "modal": "jaxblt.mixers.filters:ModalFilter",
    "implicit": "jaxblt.mixers.filters:ImplicitFilter",
    "explicit": "jaxblt.mixers.filters:ExplicitFilter",
}
"""Where each stored name is found. Change the right side when a class moves; never the left, and never drop one."""

ALIASES: dict[str, str] = {}
"""Names that other versions stored, and what they are called now."""

_SHORT = {place: name for name, place in NAMES.items()}


def stored_name(kind: type) -> str:
    """The name under which a config's class is stored: a short one, or "module:Name" for classes from elsewhere."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return _SHORT.get(place, place)


def place_of(name: str) -> str:
    """ "module:Name" of a stored name. Older versions stored that place itself, wherever the class was then."""
    name = ALIASES.get(name, name)
    if name in NAMES:
        return NAMES[name]
    module, _, kind = name.partition(":")
    if module.partition(".")[0] != "jaxblt":
        return name
    moved = [place for place in NAMES.values() if place.endswith(f":{kind}")]
    return moved[0] if moved else name
