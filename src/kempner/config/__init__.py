"""Options, TOML files, overrides and --help. Knows no section; everybody imports it."""
