"""The decoder and its loss, in plain torch. Knows neither meshes nor files."""
