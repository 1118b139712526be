"""The model cards, one module per stage, and the parts they share."""
