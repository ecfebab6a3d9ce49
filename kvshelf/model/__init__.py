"""The model: loading, devices, rotary embedding, text, and calibration."""
