"""What GEM knows, as tables: who learns from it never shares a step with it."""
