"""TensorBoard and W&B, fed from metrics.jsonl by processes of their own."""
