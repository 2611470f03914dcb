"""The decoder. It knows neither meshes nor files."""
