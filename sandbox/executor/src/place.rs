//! What the user of the container may do in it: its folders and programs are an image's, made for who knows whom.

use std::fs;
use std::io;
use std::path::Path;

use replayfork_protocol::{Denied, Run};
use rustix::fs::{Access, access};

/// Whether a home folder can be used as one.
pub fn is_usable_home(home: &str) -> bool {
    fs::metadata(home).is_ok_and(|m| m.is_dir()) && access(home, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// The outermost path on the way to a command's folder and to its program that this user may not enter or execute.
pub fn denied(command: &Run, program: &str) -> Option<Denied> {
    let program = Path::new(&command.cwd).join(program);
    let on_the_way = |path: &Path| {
        let mut folders: Vec<_> = path.ancestors().map(Path::to_owned).collect();
        folders.reverse();
        folders
    };
    let mut paths = on_the_way(Path::new(&command.cwd)).into_iter().chain(on_the_way(&program));
    let refused = paths.find(|path| access(path, Access::EXEC_OK) == Err(rustix::io::Errno::ACCESS))?;
    Some(Denied { path: refused.to_string_lossy().into_owned(), uid: rustix::process::geteuid().as_raw() })
}

/// The file of a program without a slash, as the command's own PATH has it.
///
/// # Errors
/// It is in none of the folders; where one of them can't be entered, it may be there, and permission is what is missing.
pub fn find(program: &str, command: &Run) -> io::Result<String> {
    let path = command.env.get("PATH").map_or("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", String::as_str);
    let mut closed = None;
    for folder in path.split(':') {
        let file = format!("{folder}/{program}");
        match fs::metadata(&file) {
            Ok(m) if m.is_file() && access(&file, Access::EXEC_OK).is_ok() => return Ok(file),
            Ok(m) if m.is_file() => closed = closed.or(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => closed = closed.or(Some(file)),
            _ => {}
        }
    }
    // As execvp has it: a program that may not be executed is one only where no other is found. It is then tried, and refused.
    closed.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no such program in PATH={path}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn command(cwd: &str, path: &str) -> Run {
        Run {
            argv: vec![],
            cwd: cwd.to_owned(),
            env: [("PATH".to_owned(), path.to_owned())].into(),
            stdin: String::new(),
            timeout_ms: None,
        }
    }

    #[test]
    fn what_no_user_may_execute_is_named_and_another_one_is_preferred() {
        let folder = std::env::temp_dir().join(format!("replayfork-place-{}", std::process::id()));
        let made = |name: &str, mode: u32| {
            let file = folder.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, "#!/bin/sh\n").unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            file.to_string_lossy().into_owned()
        };
        let (plain, good) = (made("plain/tool", 0o644), made("good/tool", 0o755));
        let (a, b) = (folder.join("plain").display().to_string(), folder.join("good").display().to_string());
        assert_eq!(find("tool", &command("/", &format!("{a}:{b}"))).unwrap(), good);
        assert_eq!(find("tool", &command("/", &a)).unwrap(), plain, "it is tried, so that the user is told what is refused");
        assert_eq!(find("no-such-tool", &command("/", &a)).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(denied(&command("/", ""), &plain).unwrap().path, plain);
        assert_eq!(denied(&command("/", ""), &good), None);
        assert!(is_usable_home(&a) && !is_usable_home(&plain) && !is_usable_home("/no-such-home"));
        fs::remove_dir_all(folder).unwrap();
    }
}
