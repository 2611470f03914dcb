"""Low-communication training: replicas that meet once in many steps (DiLoCo, MuLoCo)."""
