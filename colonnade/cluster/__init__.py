"""The processes of a job: starting them, their places on the mesh, devices, seeds, logs, and how they fail."""
