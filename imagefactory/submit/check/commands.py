"""The commands of submit files, without those of grids, clouds and virtual machines. Pure.

Source: HTCondor's manual, condor_submit, and the table of names in its source (25.x, 2026-08); the two of
CHTC: its guide 'Scale Beyond Local HTC Capacity' (2026-08).
"""

from __future__ import annotations

COMMANDS = frozenset((
    "accounting_group", "accounting_group_user", "allow_startup_script", "allowed_execute_duration",
    "allowed_job_duration", "append_files", "arguments", "arguments2", "batch_name", "buffer_files",
    "buffer_size", "checkpoint_destination", "checkpoint_exit_code", "compress_files", "concurrency_limits",
    "concurrency_limits_expr", "container_image", "container_is_common", "container_mount_automatically",
    "container_service_names", "container_target_dir", "copy_to_spool", "core_size",
    "cron_day_of_month", "cron_day_of_week",
    "cron_hour", "cron_minute", "cron_month", "cron_prep_time", "cron_window", "cuda_version",
    "deferral_prep_time", "deferral_time", "deferral_window", "delegate_job_gsi_credentials_lifetime",
    "description", "disk_usage", "docker_image", "docker_network_type", "docker_override_entrypoint",
    "docker_pull_policy", "docker_send_credentials", "dont_encrypt_input_files",
    "dont_encrypt_output_files", "email_attributes", "encrypt_execute_directory", "encrypt_input_files",
    "encrypt_output_files", "env", "environment", "environment2", "erase_output_and_error_on_restart",
    "error", "executable", "exit_requirements", "fetch_files", "file_remaps", "get_env", "getenv",
    "gpus_maximum_capability", "gpus_minimum_capability", "gpus_minimum_memory", "gpus_minimum_runtime",
    "grid_resource", "hold", "hold_kill_sig", "image_size", "image_size_kb", "initial_dir", "initialdir",
    "input", "interactive_args", "interactive_executable", "job_ad_information_attrs", "job_iwd",
    "job_lease_duration", "job_machine_attrs", "job_machine_attrs_history_length", "job_max_vacate_time",
    "jobset", "keep_claim_idle", "kill_sig", "kill_sig_timeout", "leave_in_queue", "load_profile",
    "local_files", "log", "log_xml", "machine_count", "manifest", "manifest_dir", "match_list_length",
    "materialize_max_idle", "max_idle", "max_job_retirement_time", "max_materialize", "max_retries",
    "max_transfer_input_mb", "max_transfer_output_mb", "memory_usage", "mount_under_scratch",
    "next_job_start_delay", "nice_user", "node_count", "noop_job", "noop_job_exit_code",
    "noop_job_exit_signal", "notification", "notify_user", "on_evict_checks", "on_exit_hold",
    "on_exit_hold_reason", "on_exit_hold_subcode", "on_exit_remove", "output", "output_destination",
    "output_directory", "parallel_script_shadow", "parallel_script_starter", "periodic_hold",
    "periodic_hold_reason", "periodic_hold_subcode", "periodic_release", "periodic_remove",
    "periodic_vacate", "preferences", "preserve_relative_paths", "primary_unix_group", "prio", "priority",
    "project_name", "public_input_files", "rank", "remote_initialdir", "remove_kill_sig", "rendezvousdir",
    "request_cpus", "request_disk", "request_gpu_memory", "request_gpus", "request_memory", "request_swap",
    "require_gpus", "requirement_suffix", "requirements", "retry_request_disk", "retry_request_memory",
    "retry_request_memory_increase", "retry_request_memory_max", "retry_until", "run_as_owner",
    "scitokens_file", "shell", "should_transfer_files", "skip_if_dataflow", "stack_size", "starter_debug",
    "starter_log", "stderr", "stdin", "stdout", "stream_error", "stream_input", "stream_output",
    "submit_event_notes", "submit_event_notes_attrs", "submit_event_user_notes", "success_exit_code",
    "suspend_job_at_exec", "transfer_checkpoint_files", "transfer_common_input", "transfer_container",
    "transfer_error", "transfer_executable", "transfer_input", "transfer_input_files", "transfer_output",
    "transfer_output_files", "transfer_output_remaps", "transfer_plugins", "ulog_execute_attrs", "universe",
    "use_oauth_services", "use_scitoken", "use_scitokens", "use_x509userproxy", "want_ads",
    "want_campus_pools", "want_graceful_removal", "want_io_proxy", "want_job_networking", "want_ospool",
    "when_to_transfer_output", "x509userproxy",
))  # fmt: skip
