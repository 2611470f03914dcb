"""The trainer's side: batches in, loss, weights out."""
