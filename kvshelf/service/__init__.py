"""The HTTP front end: FastAPI under uvicorn, in front of Ray Serve replicas that hold the models."""
