"""The runtime of Spark steps: session, Java, Delta JARs, and the check of an installation."""
