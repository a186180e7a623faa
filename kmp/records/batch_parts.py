"""Names of what a replay finds outside of layers: the parts of a batch, and the loss function."""

BATCH_X, BATCH_Y, BATCH_WEIGHTS = BATCH_PARTS = ("the batch's x", "the batch's y", "the batch's sample_weight")
LOSS_FUNCTION = "the loss function"
