//! What the operating system tells about this machine.

/// Physical performance cores that this process may use: the default number of compute threads.
///
/// Efficiency cores and hyperthreads slow ggml down, because its threads wait for each other after every
/// operation.
pub fn performance_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    platform_cores().unwrap_or(allowed).clamp(1, allowed)
}

/// The most memory that this process had resident so far, in bytes, mapped files included.
pub fn peak_memory() -> Option<usize> {
    #[cfg(unix)]
    {
        // SAFETY: an all-zero rusage is a valid value, and the pointer is to it.
        let (status, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (libc::getrusage(libc::RUSAGE_SELF, &mut usage), usage)
        };
        // macOS counts in bytes, Linux in KiB.
        let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
        (status == 0).then(|| usage.ru_maxrss as usize * unit)
    }
    #[cfg(not(unix))]
    None
}

/// macOS: percent of the memory that the kernel calls available (`kern.memorystatus_level`).
pub fn memory_level() -> Option<u8> {
    #[cfg(target_os = "macos")]
    {
        sysctl(c"kern.memorystatus_level").and_then(|level| u8::try_from(level.min(100)).ok())
    }
    #[cfg(not(target_os = "macos"))]
    None
}

/// macOS: what the system charges this process for, in bytes: its own pages, compressed ones included, without mapped
/// files.
pub fn memory_footprint() -> Option<usize> {
    #[cfg(target_os = "macos")]
    {
        // SAFETY: an all-zero record is a valid value, the pointer is to it, and the flavour is that of its type.
        let (status, usage) = unsafe {
            let mut usage: libc::rusage_info_v4 = std::mem::zeroed();
            let status = libc::proc_pid_rusage(
                libc::getpid(),
                libc::RUSAGE_INFO_V4,
                (&raw mut usage).cast(),
            );
            (status, usage)
        };
        (status == 0).then_some(usage.ri_phys_footprint as usize)
    }
    #[cfg(not(target_os = "macos"))]
    None
}

/// macOS: the thermal pressure: 0 nominal, 1 moderate, 2 heavy, from 3 on critical.
pub fn thermal_level() -> Option<u64> {
    #[cfg(target_os = "macos")]
    {
        // Of notify.h, in the system's library.
        unsafe extern "C" {
            fn notify_register_check(
                name: *const std::ffi::c_char,
                token: *mut std::ffi::c_int,
            ) -> u32;
            fn notify_get_state(token: std::ffi::c_int, state: *mut u64) -> u32;
            fn notify_cancel(token: std::ffi::c_int) -> u32;
        }
        let name = c"com.apple.system.thermalpressurelevel";
        let (mut token, mut state) = (0, 0);
        // SAFETY: the name is null-terminated, both pointers are to live integers, and the token is cancelled once.
        unsafe {
            if notify_register_check(name.as_ptr(), &mut token) != 0 {
                return None;
            }
            let status = notify_get_state(token, &mut state);
            notify_cancel(token);
            (status == 0).then_some(state)
        }
    }
    #[cfg(not(target_os = "macos"))]
    None
}

#[cfg(target_os = "macos")]
fn platform_cores() -> Option<usize> {
    // Apple silicon numbers its performance levels from the fastest; Intel Macs have none.
    sysctl(c"hw.perflevel0.physicalcpu").or_else(|| sysctl(c"hw.physicalcpu"))
}

#[cfg(target_os = "macos")]
fn sysctl(name: &std::ffi::CStr) -> Option<usize> {
    let mut value: i32 = 0;
    let mut size = size_of::<i32>();
    // SAFETY: both pointers are to live values, and size says how many bytes value has.
    let status = unsafe {
        libc::sysctlbyname(
            name.as_ptr(),
            (&raw mut value).cast(),
            &mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    (status == 0 && value > 0).then_some(value as usize)
}

#[cfg(target_os = "linux")]
fn platform_cores() -> Option<usize> {
    let read = |path: String| std::fs::read_to_string(path).ok();
    // Hybrid Intel processors list their performance cores; others have no such file.
    let fast = read("/sys/devices/cpu_core/cpus".to_owned()).map(|list| parse_cpu_list(&list));
    let mut cores = std::collections::BTreeSet::new();
    for cpu in 0..4096 {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let Some(siblings) = read(topology) else {
            break;
        };
        if fast.as_ref().is_none_or(|fast| fast.contains(&cpu)) {
            cores.insert(siblings);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn platform_cores() -> Option<usize> {
    None
}

/// Parses the kernel's list form, such as `0-3,8,10-11`.
#[cfg(target_os = "linux")]
fn parse_cpu_list(list: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last);
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_is_at_least_one_core() {
        assert!(super::performance_cores() >= 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn kernel_cpu_lists_are_understood() {
        assert_eq!(
            super::parse_cpu_list("0-3,8,10-11\n"),
            [0, 1, 2, 3, 8, 10, 11]
        );
        assert!(super::parse_cpu_list("\n").is_empty());
    }
}
