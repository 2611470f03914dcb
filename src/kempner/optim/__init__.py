"""Parameter groups, optimizers, and the learning rate as a function of the step."""
