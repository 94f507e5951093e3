"""Short names under which configs are stored, so that renaming or moving a class leaves every run readable."""

NAMES = {
    "recipe": "jaxblt.training.recipe:Recipe",
    "train": "jaxblt.training.train_config:TrainConfig",
    "fp8": "jaxblt.precision.config:Fp8Config",
    "loss_scale": "jaxblt.precision.loss_scale:LossScaleConfig",
    "reference": "jaxblt.training.objectives.reference:ReferenceConfig",
    "hybrid": "jaxblt.training.experimental.hybrid:HybridNextByte",
    "policy": "jaxblt.training.experimental.policy:PolicyConfig",
    "adamw": "jaxblt.training.optimisers.adamw:AdamWConfig",
    "lion": "jaxblt.training.optimisers.by_optax:LionConfig",
    "adafactor": "jaxblt.training.optimisers.by_optax:AdafactorConfig",
    "muon": "jaxblt.training.optimisers.by_optax:MuonConfig",
    "next_byte": "jaxblt.training.objectives.objectives:NextByte",
    "masked": "jaxblt.training.objectives.objectives:Masked",
    "span": "jaxblt.training.objectives.objectives:Span",
    "classify": "jaxblt.training.objectives.objectives:Classify",
    "classify_positions": "jaxblt.training.objectives.objectives:ClassifyPositions",
    "classify_chain": "jaxblt.training.objectives.objectives:ClassifyChain",
    "regress": "jaxblt.training.objectives.objectives:Regress",
    "multi_task": "jaxblt.training.objectives.objectives:MultiTask",
    "task_loss": "jaxblt.training.objectives.objectives:TaskLoss",
    "order_agnostic": "jaxblt.training.objectives.objectives:OrderAgnostic",
    "data": "jaxblt.data.config:DataConfig",
    "source": "jaxblt.data.mixture:SourceConfig",
    "labelled_data": "jaxblt.data.labelled:LabelledDataConfig",
    "label_task": "jaxblt.data.label_tasks:LabelTask",
    "task_data": "jaxblt.data.task_data:TaskDataConfig",
    "mqar": "jaxblt.data.tasks.recall:MQAR",
    "gap_recall": "jaxblt.data.tasks.gap_recall:GapRecall",
    "copy": "jaxblt.data.tasks.copying:Copy",
    "repeat_copy": "jaxblt.data.tasks.copying:RepeatCopy",
    "pattern_matching": "jaxblt.data.tasks.matching:PatternMatching",
    "parity": "jaxblt.data.tasks.parity:Parity",
    "listops": "jaxblt.data.tasks.listops:ListOps",
    "listops_files": "jaxblt.data.tasks.listops_files:ListOpsFiles",
    "babi": "jaxblt.data.tasks.babi:Babi",
    "babilong": "jaxblt.data.tasks.babilong:Babilong",
    "text_labels": "jaxblt.data.tasks.reviews:TextLabels",
    "text_pairs": "jaxblt.data.tasks.pairs:TextPairs",
    "pathfinder": "jaxblt.data.tasks.pixels.pathfinder:Pathfinder",
    "pixel_classes": "jaxblt.data.tasks.pixels.classes:PixelClasses",
    "mesh": "jaxblt.parallel.mesh:MeshConfig",
    "patcher": "jaxblt.patching.config:PatcherConfig",
    "boundaries": "jaxblt.patching.learned.config:BoundaryConfig",
    "level": "jaxblt.models.level:LevelConfig",
    "blt": "jaxblt.models.blt:BLTConfig",
    "released_blt": "jaxblt.models.released_blt.model:ReleasedBLTConfig",
    "byte_classifier": "jaxblt.models.classifier:ByteClassifierConfig",
    "labeller": "jaxblt.models.labeller:LabellerConfig",
    "label_head": "jaxblt.models.label_head:LabelHeadConfig",
    "words": "jaxblt.models.word_features:WordsConfig",
    "task_head": "jaxblt.models.task_heads:TaskHead",
    "task_heads": "jaxblt.models.task_heads:TaskHeadsConfig",
    "byte_lm": "jaxblt.models.byte_lm:ByteLMConfig",
    "coded_turns": "jaxblt.models.experimental.coded_turns:CodedTurnsConfig",
    "stack": "jaxblt.models.stack:StackConfig",
    "position_layer": "jaxblt.models.position_layers:PositionLayerConfig",
    "adapter": "jaxblt.adapters.update.config:AdapterConfig",
    "router": "jaxblt.adapters.code.config:RouterConfig",
    "retrieval": "jaxblt.adapters.retrieval.neighbours:Neighbours",
    "chunk_mean": "jaxblt.adapters.code.reads:ChunkMean",
    "prefix": "jaxblt.adapters.code.prefix:Prefix",
    "recurrent_memory": "jaxblt.adapters.code.recurrent_memory:RecurrentMemory",
    "side": "jaxblt.adapters.code.side:Side",
    "traces": "jaxblt.adapters.code.traces:Traces",
    "mixed_levels": "jaxblt.adapters.code.experimental.mixed:Mixed",
    "adapter_losses": "jaxblt.adapters.code.losses:AdapterLosses",
    "governor": "jaxblt.adapters.update.governor:Governor",
    "clamp": "jaxblt.adapters.code.transforms:Clamp",
    "confidence": "jaxblt.adapters.code.transforms:Confidence",
    "ema": "jaxblt.adapters.code.transforms:Ema",
    "sparse": "jaxblt.adapters.code.transforms:Sparse",
    "draw": "jaxblt.adapters.code.draw:Draw",
    "sticky": "jaxblt.adapters.code.sticky:Sticky",
    "guess": "jaxblt.adapters.code.experimental.guess:Guess",
    "capacity": "jaxblt.adapters.experimental.capacity:Capacity",
    "kronecker": "jaxblt.adapters.experimental.kronecker:Kronecker",
    "film": "jaxblt.adapters.experimental.film:Film",
    "diagonal": "jaxblt.adapters.experimental.diagonal:Diagonal",
    "codebook": "jaxblt.adapters.experimental.quantized_codes:Codebook",
    "top_k": "jaxblt.adapters.code.transforms:TopK",
    "embedding": "jaxblt.models.embeddings:EmbeddingConfig",
    "hash": "jaxblt.models.embeddings:HashConfig",
    "polynomial_hash": "jaxblt.models.released_blt.hashing:PolynomialHash",
    "positions": "jaxblt.models.positions:PositionConfig",
    "hyena": "jaxblt.mixers.hyena.hyena:HyenaConfig",
    "attention": "jaxblt.mixers.attention.attention:AttentionConfig",
    "sparse_attention": "jaxblt.mixers.attention.sparse:SparseAttentionConfig",
    "recurrence": "jaxblt.mixers.linear.recurrence:GatedRecurrenceConfig",
    "gru": "jaxblt.mixers.cells.cells:GRUConfig",
    "lstm": "jaxblt.mixers.cells.cells:LSTMConfig",
    "ntm": "jaxblt.mixers.cells.experimental.ntm:NTMConfig",
    "gated_delta_net": "jaxblt.mixers.linear.gated_delta_net:GatedDeltaNetConfig",
    "gated_linear_attention": "jaxblt.mixers.linear.gated_linear_attention:GatedLinearAttentionConfig",
    "mamba2": "jaxblt.mixers.linear.mamba2:Mamba2Config",
    "state_engine": "jaxblt.mixers.slots.state_engine:StateEngineConfig",
    "state_manager": "jaxblt.mixers.slots.experimental.state_manager:StateManager",
    "neural_memory": "jaxblt.mixers.memory.neural_memory:NeuralMemoryConfig",
    "mac": "jaxblt.mixers.memory.memory_context:MACConfig",
    "mag": "jaxblt.mixers.memory.gated_memory:MAGConfig",
    "slot_memory": "jaxblt.mixers.slots.experimental.slot_memory:SlotMemoryConfig",
    "dual_decay": "jaxblt.mixers.linear.dual_decay:DualDecayConfig",
    "modal": "jaxblt.mixers.hyena.filters:ModalFilter",
    "implicit": "jaxblt.mixers.hyena.filters:ImplicitFilter",
    "explicit": "jaxblt.mixers.hyena.filters:ExplicitFilter",
}
"""Where each stored name is found. Change the right side when a class moves; never the left, and never drop one."""

ALIASES: dict[str, str] = {}
"""Names that other versions stored, and what they are called now."""

_SHORT = {place: name for name, place in NAMES.items()}


def stored_name(kind: type) -> str:
    """Return the name that a config's class is stored under: a short one, or "module:Name" for one from elsewhere."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return _SHORT.get(place, place)


def place_of(name: str) -> str:
    """Return "module:Name" of a stored name. Older versions stored that place itself, wherever the class was."""
    name = ALIASES.get(name, name)
    if name in NAMES:
        return NAMES[name]
    module, _, kind = name.partition(":")
    if module.partition(".")[0] != "jaxblt":
        return name
    moved = [place for place in NAMES.values() if place.endswith(f":{kind}")]
    return moved[0] if moved else name
