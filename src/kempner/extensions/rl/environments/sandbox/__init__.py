"""Limited processes for rewards and for programs that models write."""
