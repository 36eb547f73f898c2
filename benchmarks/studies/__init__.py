"""Long, resumable studies of model quality; finished trainings are kept and not run again."""
