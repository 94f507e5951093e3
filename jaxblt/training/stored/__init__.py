"""What a run keeps on disk: checkpoints, recipes under short names, frozen trees; and who may be trusted."""
