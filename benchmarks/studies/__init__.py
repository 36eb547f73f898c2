"""Long, resumable studies of model quality; results of finished trainings are kept and reused."""
