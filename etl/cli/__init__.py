"""Command-line parsing: flags and YAML files as typed, validated arguments."""
